"""Finds the random generators that a dataset, a sampler or a function holds, and seeds them."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from .randomness import mix_seed

_WIDTH = 256
"""Items of a container that are looked at."""
_OBJECTS = 4096
"""Objects that are looked at in all."""
_WORD = 2**32
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type, PurePath),
    *(types.ModuleType, types.FunctionType, Tensor, torch.dtype, torch.device, torch.Size),
)
_FOREIGN = ("builtins", "torch", "typing", "abc", "collections")


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
        """Look again; return whether there is something to seed that was not there before."""
        before = self._seeded
        known = {id(held) for held, _ in before}
        self.found, asking = _walk(self._roots)
        silent = {
            path: held
            for path, held in asking.items()
            if not any(name.startswith((f"{path}.", f"{path}[")) for name in self.found)
        }
        self._seeded = [(held, crc32(path.encode())) for path, held in {**self.found, **silent}.items()]
        return any(id(held) not in known for held, _ in self._seeded)

    def seed(self, seed: int) -> None:
        """Seed each generator with its own member of a family. Seed the global streams afterwards: a method may touch them."""
        for held, salt in self._seeded:
            seed_generator(held, mix_seed(seed, salt))


def _walk(roots: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return by path, breadth first, the generators, and the objects that can be asked to seed themselves."""
    found: dict[str, Any] = {}
    asking: dict[str, Any] = {}
    # With the objects, so that none is freed and its id given to another one.
    seen: dict[int, Any] = {id(stream): stream for stream in _global_streams()}
    queue = deque(roots.items())
    while queue and len(seen) < _OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen or _is_array(value):
            continue
        seen[id(value)] = value
        if is_generator(value):
            found[path] = value
        elif not _trains(value):
            held = list(_held_by(path, value))
            if _asks_for_seed(value) and not any(is_generator(part) for _, part in held):
                asking[path] = value
            queue.extend(held)
    return found, asking


def _held_by(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items and attributes of an object, by path."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(itertools.islice(value.items(), _WIDTH)))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(itertools.islice(value, _WIDTH)))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    held = _attribute(value, "__dict__")
    if isinstance(held, dict):
        yield from ((f"{path}.{name}", item) for name, item in list(held.items()))
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in _FOREIGN:
            continue
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield f"{path}.{name}", _attribute(value, name)
        own = list(vars(kind).items())
        yield from ((f"{path}.{kind.__name__}.{name}", found) for name, found in own if is_generator(found))


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of an object, `None` where it has none or answers with an error, as placeholders of pydantic do."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _trains(value: object) -> bool:
    # What drives the training has generators that are not the data's.
    return callable(getattr(type(value), "train", None)) and not isinstance(value, nn.Module)


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


def _global_streams() -> list[Any]:
    numpy = sys.modules.get("numpy.random.mtrand")
    return [torch.default_generator, getattr(random, "_inst", None), getattr(numpy, "_rand", None)]


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype, numpy.ndarray))


def is_generator(value: object) -> bool:
    """Return whether something is a generator of random numbers that can be seeded."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    if isinstance(value, torch.Generator):
        return True
    # Without NumPy loaded there are none of its generators.
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


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


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of any kind, as it is itself given."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else _bit_generator(generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator into a state of `generator_state`."""
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bit_generator(generator).state = state
