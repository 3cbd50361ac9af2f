"""Seeds that are the same everywhere, and seeding of torch, NumPy and `random`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType
from typing import Any

import torch

_MASK63 = (1 << 63) - 1
_MASK64 = (1 << 64) - 1
_numpy: list[ModuleType | None] = []


def get_numpy() -> ModuleType | None:
    """Return NumPy, or `None` where it is not installed."""
    if not _numpy:
        try:
            _numpy.append(importlib.import_module("numpy"))
        except ImportError:
            _numpy.append(None)
    return _numpy[0]


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
        device: Device whose generator is seeded in addition to the CPU's; `None` is the current CUDA device, where there is CUDA.
    """
    seed_host_streams(seed)
    if device is None:
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        _seed_device(seed, device)


def seed_host_streams(seed: int) -> None:
    """Seed torch's CPU generator, NumPy and `random` in about 10 us."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` visits every accelerator
    random.seed(seed)
    numpy = _numpy[0] if _numpy else get_numpy()
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _seed_device(seed: int, device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    if device.index is None or not hasattr(module, "default_generators"):
        module.manual_seed(seed)
        return
    module.init()
    module.default_generators[device.index].manual_seed(seed)
