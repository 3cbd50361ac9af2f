"""The accelerator of a process: which one it is, its memory, and whether the host can pin memory for it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch import Tensor

_WITHOUT_DOUBLES = ("mps",)
"""Accelerators without float64, in which losses, weights and metrics are added."""
_ROUNDS_BLOCKS = ("cuda", "xpu")
"""Accelerators whose blocks of pinned memory torch rounds up to a power of two."""
_PORTABLE = 1
"""Flag of `cudaHostRegister`: pinned for all CUDA contexts."""


def accelerator_type() -> str | None:
    """Return the type of the accelerators of this machine, such as `"cuda"`; `None` where there are none that fit."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _WITHOUT_DOUBLES else found.type


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, such as `NVIDIA H100 80GB HBM3`."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else str(device)


def device_identity(device: torch.device) -> str:
    """Return what tells an accelerator from the others of its machine, also where processes see different ones of them."""
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    found = properties(device) if properties is not None else None
    return str(getattr(found, "uuid", device))


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Return the counters of an accelerator's allocator; none where it counts nothing. Nothing waits for the device."""
    if device.type == "cpu":
        return {}
    with contextlib.suppress(RuntimeError):
        return dict(torch.accelerator.memory_stats(device))
    return {}


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of an accelerator; `None` where it does not say."""
    if device.type == "cpu":
        return None
    with contextlib.suppress(RuntimeError):
        return torch.accelerator.get_memory_info(device)[1]
    return None


def free_unused_memory(device: torch.device) -> None:
    """Return the memory that the accelerator's allocator keeps for later; nothing happens where it keeps none."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.accelerator.empty_cache()


@functools.cache
def pins_memory(device_type: str) -> bool:
    """Return whether the host can pin memory, from and to which an accelerator copies without a wait."""
    if device_type != accelerator_type():
        return False
    # Tried, since no function of torch says whether this kind of accelerator has it.
    with contextlib.suppress(RuntimeError):
        return torch.empty(1, pin_memory=True).is_pinned()
    return False


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; by way of pinned memory, so that the host does not wait for what the device has to do before."""
    if tensor.device.type == "cpu" and pins_memory(device.type):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pinned_block(size: int, device_type: str) -> int:
    """Return the bytes that torch takes for a tensor in pinned memory."""
    return 1 << (size - 1).bit_length() if size and device_type in _ROUNDS_BLOCKS else size


def pin_shared(tensor: Tensor) -> bool:
    """Pin a tensor in shared memory for as long as it lives; return whether that was possible, which it is with CUDA alone."""
    if not torch.cuda.is_available() or not tensor.nbytes:
        return not tensor.nbytes  # an empty one needs none
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer = tensor.data_ptr()
    if int(runtime.cudaHostRegister(pointer, tensor.nbytes, _PORTABLE)):
        # CUDA reports an error again with the next kernel, no matter which code launches it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        return False
    weakref.finalize(tensor, runtime.cudaHostUnregister, pointer).atexit = False
    return True
