"""A copy of a state that later updates do not reach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.utils.tensors import local_part, with_local_part

from .errors import CheckpointError

_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_KEPT = (type(None), torch.dtype, torch.device, torch.Size, *_PLAIN)


def convert(value: object, on_tensor: Callable[[Tensor], Tensor], path: str = "") -> Any:
    """Return nested mappings, lists and tuples as dicts, lists and tuples, with `on_tensor` applied to every tensor."""
    if isinstance(value, Tensor):
        return on_tensor(value.detach())
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
    """Host memory for copies of a state.

    One set of buffers is kept between saves, since fresh memory costs several times the copy itself: it is taken by the first
    save and by every later one that finds it free. A save that comes while it is taken gets other memory.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._spare: dict[Any, list[Tensor]] | None = {}
        self._lock = threading.Lock()

    def copy(self, value: object) -> tuple[Any, Callable[[], None]]:
        """Copy a state; tensors that are one and the same share their copy."""
        with self._lock:
            spare, self._spare = self._spare, None
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
            key = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())
            if local.numel() == 0 or key not in copies:
                copies[key] = self._buffer(local, spare, used)
                copies[key].copy_(local, non_blocking=True)
                devices.add(local.device)
            return with_local_part(tensor, copies[key])

        copied = convert(value, on_tensor)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return copied, lambda: self._give_back(spare is not None, used)

    def _buffer(self, tensor: Tensor, spare: dict[Any, list[Tensor]] | None, used: dict[Any, list[Tensor]]) -> Tensor:
        key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type)
        free = spare.get(key) if spare else None
        # Through empty_like, so that a slice of a large storage does not take all of it along.
        if free:
            buffer = free.pop()
        else:
            pinned = tensor.device.type == "cuda" and not self._shared
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            if self._shared:
                buffer.share_memory_()  # type: ignore[no-untyped-call]
        used.setdefault(key, []).append(buffer)
        return buffer

    def _give_back(self, reusable: bool, used: dict[Any, list[Tensor]]) -> None:
        if reusable:
            with self._lock:
                self._spare = used


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
        if local.layout == torch.strided and local.untyped_storage().nbytes() > local.numel() * local.element_size():
            return with_local_part(tensor, local.clone())
        return tensor

    return convert(value, on_tensor)


def count_bytes(value: object) -> int:
    """Return the bytes that the tensors of a state take, those of sharded ones on all ranks together."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(count_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(count_bytes(item) for item in value)
    return 0
