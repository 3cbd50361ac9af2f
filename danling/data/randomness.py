"""Random streams: seeds that are the same everywhere, and saving, restoring and shielding torch, NumPy and `random`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .host_streams import HOST_STREAMS, get_numpy

_MASK63 = (1 << 63) - 1
_MASK64 = (1 << 64) - 1


def derive_seed(*parts: int | str) -> int:
    """Return a seed that depends on every part and is the same in all processes and on all machines.

    Args:
        parts: Integers and strings, such as a base seed and what the stream is for. `1` and `"1"` differ.

    Returns:
        An integer of 63 bits, never negative.

    Raises:
        TypeError: If a part is neither an integer nor a string.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        if not isinstance(part, (int, str)):
            raise TypeError(f"Expected seed parts of type int or str. Received: part={part!r} ({type(part).__name__}).")
        encoded = str(int(part) if isinstance(part, int) else part).encode()
        # With its length and type, so that no two lists of parts read the same.
        digest.update(b"%c%d:" % (b"i" if isinstance(part, int) else b"s", len(encoded)))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little") & _MASK63


def mix_seed(base: int, index: int) -> int:
    """Return the `index`-th seed of the family `base` in about 0.5 us.

    This is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

    Args:
        base: A seed of `derive_seed`.
        index: Which one.

    Returns:
        An integer of 63 bits, never negative.
    """
    mixed = (base + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (mixed ^ (mixed >> 31)) & _MASK63


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Ask torch for deterministic kernels inside; its switches are put back on exit."""
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(before)


def seed_streams(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, the current accelerator, NumPy and `random`.

    Args:
        seed: A seed of `derive_seed`.
        device: Whose generator to seed besides the CPU's; `None` is the current CUDA device, where there is CUDA.
    """
    seed_host_streams(seed)
    if device is None:
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        _seed_device(seed, device)


def seed_host_streams(seed: int) -> None:
    """Seed torch's CPU generator, NumPy and `random` in about 9 us.

    Args:
        seed: An integer of 63 bits; NumPy takes the lower 32.
    """
    HOST_STREAMS.seed(seed)


def _seed_device(seed: int, device: torch.device) -> None:
    module = _device_module(device)
    if device.index is None or not hasattr(module, "default_generators"):
        module.manual_seed(seed)
        return
    module.init()
    module.default_generators[device.index].manual_seed(seed)


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _current_device(device: torch.device | None) -> torch.device | None:
    """Return the accelerator whose stream is meant, `None` for none."""
    if device is not None:
        return None if device.type == "cpu" else device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return None


def _get_device_state(device: torch.device) -> Tensor:
    module = _device_module(device)
    state: Tensor = module.get_rng_state() if device.index is None else module.get_rng_state(device)
    return state


def _set_device_state(state: Tensor, device: torch.device) -> None:
    module = _device_module(device)
    if device.index is None:
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def capture_random_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of this process's random streams.

    Args:
        device: The accelerator to include; `None` is the current CUDA device, if CUDA is in use; the CPU is always
            included.

    Returns:
        Tensors and plain values only, so that `torch.load(weights_only=True)` reads it.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    numpy = get_numpy()
    if numpy is not None:
        state["numpy"] = to_tensors(numpy.random.get_state(legacy=False))
    accelerator = _current_device(device)
    if accelerator is not None:
        state["device"] = _get_device_state(accelerator)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Put this process's random streams into a captured state; streams the state does not have are left alone.

    Args:
        state: What `capture_random_state` returned.
        device: The accelerator whose stream is meant, as in `capture_random_state`.
    """
    HOST_STREAMS.forget()
    torch.default_generator.set_state(state["torch"].cpu())
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = get_numpy()
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(to_arrays(state["numpy"], numpy))
    accelerator = _current_device(device)
    if accelerator is not None and "device" in state:
        _set_device_state(state["device"].cpu(), accelerator)


def to_tensors(value: Any) -> Any:
    """Return the state of a generator of NumPy with tensors for its arrays, as a checkpoint holds it."""
    if isinstance(value, Mapping):
        return {key: to_tensors(item) for key, item in value.items()}
    if getattr(value, "ndim", 0):
        return torch.tensor(value.astype("uint64").view("int64").tolist(), dtype=torch.int64)
    return value.item() if hasattr(value, "item") else value


def to_arrays(value: object, numpy: ModuleType) -> Any:
    """Return what `to_tensors` was given."""
    if isinstance(value, Mapping):
        return {key: to_arrays(item, numpy) for key, item in value.items()}
    # 64-bit words whatever the bit generator: NumPy takes each down to its own width.
    return numpy.asarray(value.tolist(), dtype="int64").view("uint64") if isinstance(value, Tensor) else value


@contextmanager
def preserved_random_state(device: torch.device | None = None, seed: int | None = None) -> Iterator[None]:
    """Put torch's, the accelerator's, NumPy's and Python's streams back on exit, also after an error.

    Args:
        device: The accelerator to include, as in `capture_random_state`.
        seed: Seed the streams with it inside; `None` leaves them where they are.
    """
    accelerator = _current_device(device)
    host = HOST_STREAMS.save()
    on_device = _get_device_state(accelerator) if accelerator is not None else None
    try:
        if seed is not None:
            seed_streams(seed, accelerator or torch.device("cpu"))
        yield
    finally:
        HOST_STREAMS.put_back(host)
        if accelerator is not None and on_device is not None:
            _set_device_state(on_device, accelerator)
