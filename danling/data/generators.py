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
from typing import Any, NamedTuple
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


class Place(NamedTuple):
    """Where a generator is held. It is looked up at each use, since a user may put another one in its place.

    Attributes:
        path: Attributes, keys and indices from the root, such as `transform.transforms[2].rng`.
        container: A mapping or sequence, such as the `__dict__` of an object.
        key: Its key.
    """

    path: str
    container: Any
    key: Any

    def current(self) -> Any:
        """Return what is held now, `None` where nothing is any more."""
        try:
            return self.container[self.key]
        except (LookupError, ValueError):
            return None


class Generators:
    """The generators of torch, NumPy and `random.Random` that objects hold.

    Attributes, classes, lists, tuples, sets, mappings, partial functions and bound methods are followed, at any depth. The global streams
    do not count, nor does what belongs to an object that trains. Nothing is called and no property is read. A look takes 20 to 200 us.

    A transform that shows no generator and has `set_random_seed(seed)` or `set_random_state(seed=...)` is seeded through that method.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self.places: list[Place] = []
        self._seeded: list[tuple[Any, int]] = []
        self.look()

    def __bool__(self) -> bool:
        return bool(self._seeded)

    def look(self) -> bool:
        """Look again; return whether there is something to seed that was not there before."""
        known = {id(_target(held)) for held, _ in self._seeded}
        self.places, asking, _ = _walk(self._roots)
        holders = tuple(place.path for place in self.places)
        silent = [
            (path, held)
            for path, held in asking
            if not any(name.startswith((f"{path}.", f"{path}[")) for name in holders)
        ]
        self._seeded = [(place, crc32(place.path.encode())) for place in self.places]
        self._seeded += [(held, crc32(path.encode())) for path, held in silent]
        return any(id(_target(held)) not in known for held, _ in self._seeded)

    def seed(self, seed: int) -> None:
        """Seed each generator with its own member of a family. Seed the global streams afterwards: a method may touch them."""
        for held, salt in self._seeded:
            target = _target(held)
            if not isinstance(held, Place) or is_generator(target):  # a user may have put something else there
                seed_generator(target, mix_seed(seed, salt))


def _target(held: Any) -> Any:
    return held.current() if isinstance(held, Place) else held


def _walk(roots: dict[str, Any]) -> tuple[list[Place], list[tuple[str, Any]], list[Any]]:
    """Return where generators are held, breadth first, the objects by path that can be asked to seed themselves, and all that was met."""
    places: list[Place] = []
    asking: list[tuple[str, Any]] = []
    # With the objects, so that none is freed and its id given to another one.
    seen: dict[int, Any] = {id(stream): stream for stream in _global_streams()}
    queue = deque(Place(name, roots, name) for name in roots)
    while queue and len(seen) < _OBJECTS:
        place = queue.popleft()
        value = place.current()
        if isinstance(value, _LEAVES) or id(value) in seen or _is_array(value):
            continue
        seen[id(value)] = value
        if is_generator(value):
            places.append(place)
        elif not _trains(value):
            held = list(_held_by(place.path, value))
            if _asks_for_seed(value) and not any(is_generator(part.current()) for part in held):
                asking.append((place.path, value))
            queue.extend(held)
    return places, asking, list(seen.values())


def _held_by(path: str, value: Any) -> Iterator[Place]:
    """Yield the places of what an object holds."""
    if isinstance(value, dict):
        yield from (Place(f"{path}[{key!r}]", value, key) for key in list(itertools.islice(value, _WIDTH)))
    elif isinstance(value, (list, tuple, deque)):
        yield from (Place(f"{path}[{number}]", value, number) for number in range(min(len(value), _WIDTH)))
    elif isinstance(value, (set, frozenset)):
        members = list(itertools.islice(value, _WIDTH))
        yield from (Place(f"{path}{{{number}}}", members, number) for number in range(len(members)))
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from (Place(f"{path}.{name}", parts, name) for name in parts)
    elif isinstance(value, types.MethodType):
        yield Place(f"{path}.__self__", {"self": value.__self__}, "self")
    held = _attribute(value, "__dict__")
    if isinstance(held, dict):
        yield from (Place(f"{path}.{name}", held, name) for name in list(held))
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in _FOREIGN:
            continue
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield Place(f"{path}.{name}", {name: _attribute(value, name)}, name)
        yield from (
            Place(f"{path}.{name}", vars(kind), name) for name, found in list(vars(kind).items()) if is_generator(found)
        )


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
    """Whether an object is a transform with one of the methods; what cannot be called may change what it holds when it is seeded."""
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
