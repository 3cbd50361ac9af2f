"""A copy of a state that later updates do not reach: plain values and tensors on the host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.utils.devices import pin_shared, pinned_block, pins_memory
from danling.utils.tensors import is_plain_tensor, local_part, with_local_part
from danling.utils.trees import tensors

from .errors import CheckpointError

logger = logging.getLogger("danling")

_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_KEPT = (type(None), torch.dtype, torch.device, torch.Size, *_PLAIN)


def convert(value: object, on_tensor: Callable[[Tensor], Tensor], path: str = "") -> Any:
    """Return nested mappings, lists and tuples as dicts, lists and tuples, with `on_tensor` applied to every tensor."""
    if isinstance(value, Tensor):
        return on_tensor(readable(value.detach(), path))
    if isinstance(value, Mapping):
        return {
            _plain(key, path): convert(item, on_tensor, f"{path}.{key}" if path else str(key))
            for key, item in value.items()
        }
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        items = [convert(item, on_tensor, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return {_plain(item, path) for item in value}
    return _plain(value, path)


def readable(tensor: Tensor, path: str = "a tensor") -> Tensor:
    """Return a tensor that a safe reader knows: one of a class of the user's as a plain tensor, where that has all of it."""
    local = local_part(tensor)
    if type(local) is Tensor or type(local) in _registered():
        return tensor
    # Such as of a class that only adds methods.
    if is_plain_tensor(local):
        return with_local_part(tensor, local.as_subclass(Tensor))
    kind = type(local).__name__
    raise CheckpointError(
        f"Expected tensors that `torch.load(weights_only=True)` reads. Received: {path} of the class {kind}, which has more than "
        f"values. Register the class in the program with torch.serialization.add_safe_globals([{kind}]), or keep a plain tensor there."
    )


def _registered() -> set[Any]:
    """Return the classes that torch's safe reader knows."""
    # An entry is a class, or a class with the name that it has in files.
    return {
        each[0] if isinstance(each, tuple) else each
        for each in torch.serialization.get_safe_globals()
    }


def _plain(value: object, path: str) -> object:
    if type(value) in _KEPT:
        return value
    for kind in _PLAIN:
        # Subclasses such as numpy's float64 and enumerations, which a safe reader does not know.
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"Expected tensors and plain values in a checkpoint. Received: {path}={value!r} ({type(value).__name__}). Save it as a tensor, a "
        "number, a string, or a list or dict of these."
    )


class SnapshotBuffers:
    """Host memory for copies of a state, pinned where they come from an accelerator.

    The buffers of the copy that was released last are kept for the next one, since fresh memory costs several times the copy itself.

    Args:
        shared: Whether another process reads the copies.
        most: How many copies there are at once: one is written, one may wait, and one is made before it takes the place of that.
    """

    def __init__(self, *, shared: bool = False, most: int = 3) -> None:
        self._shared = shared
        self._most = most
        self._spare: dict[Any, list[Tensor]] = {}
        self._sizes: list[int] | None = []
        """Bytes of the buffers of the first copy from an accelerator; `None` once its memory has been logged."""
        self._unpinned = 0

    def copy(self, value: object) -> tuple[Any, Callable[[], None]]:
        """Copy a state, and return what releases its memory; tensors that are one and the same share their copy."""
        spare, self._spare = self._spare, {}
        used: dict[Any, list[Tensor]] = {}
        copies: dict[Any, Tensor] = {}
        devices = set()

        def on_tensor(tensor: Tensor) -> Tensor:
            local = local_part(tensor)
            if is_traceable_wrapper_subclass(local):
                # Such as a weight in 8 bits: it owns no memory, and may not support empty copies.
                return with_local_part(tensor, _with_parts(local, on_tensor))
            if local.layout != torch.strided:
                return tensor.cpu().clone()
            # Buffers are alike by `kind`; two names of one tensor have the same `key`. Without elements
            # all have the address 0.
            kind = (local.dtype, local.shape, local.stride(), local.device.type)
            key = (local.device, local.data_ptr(), *kind)
            if local.numel() == 0 or key not in copies:
                free = spare.get(kind)
                copies[key] = buffer = free.pop() if free else self._new(local)
                used.setdefault(kind, []).append(buffer)
                buffer.copy_(local, non_blocking=True)
                devices.add(local.device)
            return with_local_part(tensor, copies[key])

        def release() -> None:
            self._spare = used

        copied = convert(value, on_tensor)
        # The copies were only queued: the next update must not change what they read.
        accelerators = [device for device in devices if device.type != "cpu"]
        for device in accelerators:
            torch.accelerator.synchronize(device)
        if accelerators and self._sizes is not None:
            self._log_memory(self._sizes, accelerators[0])
            self._sizes = None
        return copied, release

    def _new(self, tensor: Tensor) -> Tensor:
        can_pin = pins_memory(tensor.device.type)
        # Through empty_like, so that a slice of a large storage does not take all of it along.
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=can_pin and not self._shared)
        is_pinned = can_pin
        if self._shared:
            buffer.share_memory_()  # type: ignore[no-untyped-call]
            is_pinned = can_pin and pin_shared(buffer)
        if self._sizes is not None and tensor.device.type != "cpu":
            self._sizes.append(buffer.nbytes)
            self._unpinned += 0 if is_pinned else buffer.nbytes
        return buffer

    def _log_memory(self, sizes: list[int], device: torch.device) -> None:
        """Log once what the copies take, and where they are not pinned, as the first one shows."""
        if self._unpinned:
            instead = (
                " checkpoint.async_mode='async' pins them."
                if self._shared and pins_memory(device.type)
                else ""
            )
            logger.warning(
                "%.1f MB of %.1f MB of a background save are copied from %s to memory of the host that is not pinned, which takes "
                "longer.%s",
                self._unpinned / 1e6,
                sum(sizes) / 1e6,
                device,
                instead,
            )
            return
        # Shared memory is pinned where it is. Other blocks are those of torch's allocator, which keeps them for the process.
        blocks = sizes if self._shared else [pinned_block(size, device.type) for size in sizes]
        most = self._most * sum(blocks)
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # Pinned memory is never swapped out: with several ranks on a machine, half of it is too much.
        level = logging.WARNING if most > of_host / 2 else logging.INFO
        logger.log(
            level,
            "Copies for background saves take %.1f MB of pinned memory of the host on each rank: up to %d of %.1f MB. A state has %.1f MB; "
            "torch rounds a block of pinned memory up to a power of two, and keeps it until the process ends.",
            most / 1e6,
            self._most,
            sum(blocks) / 1e6,
            sum(sizes) / 1e6,
        )


def _with_parts(tensor: Tensor, on_part: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that is made of others with something else in the place of these."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: on_part(getattr(tensor, name).detach()) for name in names}
    whole: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return whole


def to_host(value: object) -> Any:
    """Return a state ready to be written at once: on the CPU, and no tensor that drags a larger storage along."""

    def on_tensor(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        if local.device.type != "cpu":
            return with_local_part(tensor, local.cpu())
        if (
            local.layout == torch.strided
            and local.untyped_storage().nbytes() > local.numel() * local.element_size()
        ):
            return with_local_part(tensor, local.clone())
        return tensor

    return convert(value, on_tensor)


def count_bytes(value: object) -> int:
    """Return the bytes that the tensors of a state take, those of sharded ones on all ranks together."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(value))
