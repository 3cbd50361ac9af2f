"""Seeds that are the same everywhere, seeding of torch, NumPy and `random`, and of the generators that objects hold."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import logging
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import PurePath
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from danling.utils.devices import accelerator_type

logger = logging.getLogger("danling")

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_MASK63 = (1 << 63) - 1
_MASK64 = (1 << 64) - 1
_WIDTH = 256
"""Items of a container that are looked at."""
_OBJECTS = 4096
"""Objects that are looked at in all."""
_WORD = 2**32
LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type, PurePath),
    *(types.ModuleType, types.FunctionType, Tensor, torch.dtype, torch.device, torch.Size),
)
"""Kinds of values that hold no generator."""
_PRINTED = (type(None), int, float, complex, str, bytes, type, PurePath, torch.dtype, torch.device)
"""Kinds of keys that print the same in each process."""
_FOREIGN = ("builtins", "torch", "typing", "abc", "collections")
"""Packages whose classes have no generator, and many attributes."""


@functools.cache
def get_numpy() -> Any:
    """Return NumPy, or `None` where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


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
        if isinstance(part, int):
            kind, encoded = b"i", str(int(part)).encode()  # a boolean counts as its number
        elif isinstance(part, str):
            kind, encoded = b"s", part.encode()
        else:
            raise TypeError(
                f"Expected seed parts of type int or str. Received: part={part!r} ({type(part).__name__})."
            )
        # With its length and type, so that no two lists of parts read the same.
        digest.update(b"%c%d:" % (kind, len(encoded)))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little") & _MASK63


def mix_seed(base: int, *indices: int) -> int:
    """Return the seed with this number of the family `base` in about 0.5 us; with several numbers, that of a family of families.

    This is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

    Args:
        base: A seed of `derive_seed`.
        indices: Which one; of several, each is a number in the family of the seed before.

    Returns:
        An integer of 63 bits, never negative.
    """
    for index in indices:
        mixed = (base + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        base = (mixed ^ (mixed >> 31)) & _MASK63
    return base


def set_cublas_workspace() -> None:
    """Give cuBLAS the workspace without which torch refuses deterministic matrix products; a value in the environment stays.

    Called before the process uses CUDA: cuBLAS and torch read the variable once.
    """
    if _CUBLAS_WORKSPACE in os.environ:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        logger.warning(
            "This process has used CUDA before a runner with deterministic=true was made. Matrix products may not be reproducible. Start "
            "the program with %s=:4096:8 in its environment.",
            _CUBLAS_WORKSPACE,
        )
    os.environ[_CUBLAS_WORKSPACE] = ":4096:8"


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Ask torch for deterministic kernels inside; its switches are put back on exit."""
    before = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(before)


# Each stream has its own key: torch's CPU generator the key of the place itself, every other stream that key mixed with one of these.
# With one key for all, torch and NumPy would draw the same words: both are MT19937 with the same initialisation.
_OF_NUMPY = derive_seed("stream", "numpy")
_OF_PYTHON = derive_seed("stream", "random")
_OF_DEVICE = derive_seed("stream", "device")
_MIXER = 0xBF58476D1CE4E5B9


def _stream_seed(seed: int, stream: int) -> int:
    """Return the key of a stream in 0.4 us. Each bit of the low half, which NumPy reads, depends on both halves of the seed."""
    mixed = ((seed ^ stream) * _MIXER) & _MASK63
    return mixed ^ (mixed >> 32)


def seed_streams(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, the current accelerator, NumPy and `random`, each with its own key.

    Args:
        seed: A seed of `derive_seed`.
        device: Device whose generator is seeded in addition to the CPU's; `None` is the current accelerator, where there is one.
    """
    seed_host_streams(seed)
    if device is None:
        device = torch.device(accelerator_type() or "cpu")
    if device.type != "cpu":
        seed_device(seed, device)


def seed_host_streams(seed: int) -> None:
    """Seed torch's CPU generator, NumPy and `random` in about 10 us."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` visits every accelerator
    # `_stream_seed` of each, without its call: an update comes here twice.
    mixed = ((seed ^ _OF_PYTHON) * _MIXER) & _MASK63
    random.seed(mixed ^ (mixed >> 32))
    if (numpy := get_numpy()) is not None:
        mixed = ((seed ^ _OF_NUMPY) * _MIXER) & _MASK63
        numpy.random.seed((mixed ^ (mixed >> 32)) & 0xFFFFFFFF)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator and that of a device, as `seed_streams` does, and no other stream."""
    # Not `torch.manual_seed`, which visits every kind of accelerator: 149 us instead of 1.5.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        seed_device(seed, device)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generator of an accelerator."""
    own = _stream_seed(seed, _OF_DEVICE)
    module = torch.get_device_module(device)
    if device.index is None or not hasattr(module, "default_generators"):
        module.manual_seed(own)
    else:
        # The generators of the devices exist only then.
        module.init()
        module.default_generators[device.index].manual_seed(own)


# Generators that objects hold


class Generators:
    """The generators of torch, NumPy and `random.Random` that objects hold.

    Attributes, classes, lists, tuples, sets, mappings, partial functions and bound methods are followed, at any depth. The global streams
    do not count, nor does what belongs to an object that trains. Nothing is called and no property is read. A look takes 20 to 200 us.

    A transform that shows no generator and has `set_random_seed(seed)` or `set_random_state(seed=...)` is seeded through that method.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self.found: dict[str, Any] = {}
        """Generators by path, such as `transform.transforms[2].rng`."""
        self._seeded: list[tuple[Any, int]] = []
        self.look()

    def __bool__(self) -> bool:
        return bool(self._seeded)

    def look(self) -> bool:
        """Look again, breadth first; return whether there is something to seed that was not there before."""
        known = {id(generator) for generator, _ in self._seeded}
        numpy, mtrand = sys.modules.get("numpy"), sys.modules.get("numpy.random.mtrand")
        leaves = LEAVES if numpy is None else (*LEAVES, numpy.generic, numpy.dtype, numpy.ndarray)
        streams = (
            torch.default_generator,
            getattr(random, "_inst", None),
            getattr(mtrand, "_rand", None),
        )
        # With the objects, so that none is freed and its id given to another one.
        seen: dict[int, Any] = {id(stream): stream for stream in streams}
        self.found, asking = {}, {}
        queue = deque(self._roots.items())
        while queue and len(seen) < _OBJECTS:
            path, value = queue.popleft()
            if isinstance(value, leaves) or id(value) in seen:
                continue
            seen[id(value)] = value
            if is_generator(value):
                self.found[path] = value
            elif isinstance(value, nn.Module) or not _drives(type(value)):
                parts = _held_by(path, value)
                if _asks_for_seed(value) and not any(is_generator(part) for _, part in parts):
                    asking[path] = value
                queue.extend(parts)
        # An object whose generators were found needs no call of its method.
        asked = {
            path: value
            for path, value in asking.items()
            if not any(name.startswith((f"{path}.", f"{path}[")) for name in self.found)
        }
        self._seeded = [
            (generator, crc32(path.encode())) for path, generator in {**self.found, **asked}.items()
        ]
        return any(id(generator) not in known for generator, _ in self._seeded)

    def seed(self, seed: int) -> None:
        """Seed each generator with its own member of a family, and then the global streams of the host, which a method may touch."""
        for generator, salt in self._seeded:
            seed_generator(generator, mix_seed(seed, salt))
        seed_host_streams(seed)


def _drives(kind: type) -> bool:
    """Whether objects of a class drive the training: their generators are not the data's.

    What torch keeps of a block that it shards is a hundred objects: those of forty blocks are all that a look has time for.
    """
    return callable(getattr(kind, "train", None)) or kind.__module__.startswith(
        "torch.distributed."
    )


def _held_by(path: str, value: object) -> list[tuple[str, object]]:
    """Return the items and attributes of an object, by path."""
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        entries = list(itertools.islice(value.items(), _WIDTH))
        parts += [
            (f"{path}[{_key_of(key, number)}]", item) for number, (key, item) in enumerate(entries)
        ]
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        items = itertools.islice(value, _WIDTH)
        parts += [(f"{path}[{number}]", item) for number, item in enumerate(items)]
    elif isinstance(value, functools.partial):
        parts += [(f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    elif isinstance(value, types.MethodType):
        parts.append((f"{path}.__self__", value.__self__))
    attributes = _attribute(value, "__dict__")
    if isinstance(attributes, dict):
        parts += [(f"{path}.{name}", item) for name, item in list(attributes.items())]
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in _FOREIGN:
            continue
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += [(f"{path}.{name}", _attribute(value, name)) for name in names]
        # What the class has is mostly functions.
        parts += [
            (f"{path}.{kind.__name__}.{name}", found)
            for name, found in list(vars(kind).items())
            if not isinstance(found, LEAVES) and is_generator(found)
        ]
    return parts


def _key_of(key: object, number: int) -> str:
    """Return the name of a key of a mapping in a path: a number for a key that may print its values or an address."""
    parts = key if isinstance(key, tuple) else (key,)
    return repr(key) if all(isinstance(part, _PRINTED) for part in parts) else f"#{number}"


def _attribute(value: object, name: str) -> Any:
    """Return an attribute of an object, `None` where it has none or answers with an error, as placeholders of pydantic do."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _asks_for_seed(value: object) -> bool:
    """Whether an object is a transform with one of the methods; seeding an object that cannot be called may change its data."""
    kind: Any = type(value)
    if not callable(value):
        return False
    if callable(getattr(kind, "set_random_seed", None)):
        return True
    try:
        return "seed" in inspect.signature(kind.set_random_state).parameters
    except (AttributeError, TypeError, ValueError):
        return False


def is_generator(value: object) -> bool:
    """Return whether something is a generator of random numbers that can be seeded."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    if isinstance(value, torch.Generator):
        return True
    # Without NumPy loaded there are none of its generators.
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(
        value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    )


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of any kind, or an object by its method."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif is_generator(generator):
        bits = _bit_generator(generator)
        fresh = type(bits)(seed).state
        if hasattr(generator, "set_state"):
            # Through the outer object, which may hold a normal deviate back.
            generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})
        else:
            bits.state = fresh
    elif callable(getattr(generator, "set_random_seed", None)):
        generator.set_random_seed(seed % _WORD)
    else:
        generator.set_random_state(seed=seed % _WORD)


def _bit_generator(generator: object) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator
    return getattr(generator, "_bit_generator", generator)


def generator_state(generator: object) -> Any:
    """Return the state of a generator of any kind, as it is itself given."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _bit_generator(generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator into a state of `generator_state`."""
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bit_generator(generator).state = state
