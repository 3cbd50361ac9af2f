"""Generators that an object holds: found once, then keyed, saved and put back."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from .host_streams import get_numpy
from .randomness import mix_seed, to_arrays, to_tensors
from .seeders import Seeder, asks_for_seed, seeder_of

_WIDTH = 256
"""Items of a container that are looked at: transforms stand in short lists, samples in long ones."""
_OBJECTS = 4096
"""Objects that are looked at in all."""
_LOOKS = 512
"""How often a process looks again because something was set."""

LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type, PurePath),
    *(types.ModuleType, types.CodeType, types.FrameType, weakref.ReferenceType, logging.Logger, logging.Handler),
    *(Tensor, torch.dtype, torch.device, torch.Size),
)
"""What holds no generator."""
_ITERATORS: tuple[type[Any], ...] = (
    *(types.GeneratorType, itertools.cycle, itertools.count, itertools.chain, itertools.islice),
    *(type(iter([])), type(iter(())), type(iter({})), type(iter(range(0))), zip, map, filter, enumerate),
)


class Place(NamedTuple):
    """Where a generator is held. What is there is looked up each time, since a user may put another one in its place.

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
    """The generators reachable from an object: of torch, of NumPy, and `random.Random`.

    Attributes, lists, tuples, mappings, partial functions, bound methods, closures, class attributes and the module
    variables that functions name are followed, circles included. The global streams do not count, nor does what belongs
    to an object that trains. Nothing is called and no property is read. Making one looks once, in 20 to 200 us;
    `changed` says in about 1 us whether to look again.

    An object that has `set_random_seed` or `set_random_state` and shows no generator is seeded by that; its state cannot be saved.

    Args:
        roots: What to look through, by name; the name begins the path.
        skip: Whether to leave an object alone, and all that only it holds.
    """

    def __init__(self, roots: Mapping[str, object], *, skip: Callable[[Any], bool] | None = None) -> None:
        self.roots = dict(roots)
        self._skip = skip
        self._looks = 0
        self._look()

    def _look(self) -> None:
        walk = _Walk(self._skip)
        walk.follow(self.roots)
        self._looks += 1
        self.places: list[Place] = walk.places
        self.holders: list[tuple[str, Any]] = walk.holders
        """The objects with attributes that were looked at, by path."""
        self.uncontrollable: list[tuple[str, str]] = walk.uncontrollable
        """Path and type of what can neither be seeded nor saved."""
        self.seeders: list[Seeder] = walk.seeders()
        """What seeds objects without a generator in sight."""
        self._sizes = [(container, len(container)) for container in walk.containers]
        attributes = [vars(holder) for _, holder in walk.holders[:_WIDTH]]
        self._empty = [(held, key) for held in attributes for key in held if held[key] is None]
        self._salts = [crc32(place.path.encode()) for place in self.places]
        self._seeder_salts = [crc32(seeder.path.encode()) for seeder in self.seeders]

    def __bool__(self) -> bool:
        return bool(self.places or self.seeders)

    def changed(self) -> bool:
        """Return whether something was set where nothing was, as a generator is that is made when it is first used."""
        if self._looks >= _LOOKS:
            return False
        return any(len(container) != size for container, size in self._sizes) or any(
            held.get(key) is not None for held, key in self._empty
        )

    def look_again(self) -> bool:
        """Look again; return whether there are generators that were not there before."""
        known = {id(place.current()) for place in self.places}
        self._look()
        return any(id(place.current()) not in known for place in self.places)

    def seed(self, seed: int, origins: Mapping[str, int] | None = None) -> None:
        """Seed each generator with its own member of a family; the global streams are seeded afterwards, for a method may touch them.

        Args:
            seed: Of the family, an integer of 63 bits.
            origins: Numbers by path that tell members apart further.
        """
        self.seed_unseen(seed)
        for place, salt in zip(self.places, self._salts, strict=True):
            own = salt ^ origins.get(place.path, 0) if origins else salt
            seed_generator(place.current(), mix_seed(seed, own))

    def seed_unseen(self, seed: int) -> None:
        """Seed what shows no generator, each with its own member of a family, and leave the generators as they are.

        Args:
            seed: Of the family, an integer of 63 bits.
        """
        for seeder, salt in zip(self.seeders, self._seeder_salts, strict=True):
            seeder.seed(mix_seed(seed, salt))

    def states(self) -> dict[str, Any]:
        """Return the generators' states by path, as tensors and plain values."""
        return {place.path: generator_state(place.current()) for place in self.places}

    def set_states(self, states: Mapping[str, object]) -> None:
        """Put the generators into saved states; those of which none was saved are left alone."""
        for place in self.places:
            if states.get(place.path) is not None:
                set_generator_state(place.current(), states[place.path])


def held_objects(roots: Mapping[str, object]) -> list[Any] | None:
    """Return the objects that a walk from the roots meets, and the classes and modules that these hold.

    What only the methods of classes name is left out. `None` stands for more than the walk looks at.

    Args:
        roots: What to look through, by name.
    """
    walk = _Walk(None, methods=False)
    walk.follow(dict(roots))
    return walk.met


class _Walk:
    """A breadth-first walk over what objects hold, and over what their methods name."""

    def __init__(self, skip: Callable[[Any], bool] | None, *, methods: bool = True) -> None:
        self._methods = methods
        self.places: list[Place] = []
        self.holders: list[tuple[str, Any]] = []
        self.uncontrollable: list[tuple[str, str]] = []
        self._asking: list[tuple[str, Any]] = []
        self.containers: list[Any] = []
        self._named: dict[int, Any] = {}
        """Classes and modules that something holds."""
        self._skip = skip
        # The objects too, so that none is freed and its id given to another one.
        self._seen: dict[int, Any] = {id(stream): stream for stream in _global_streams()}
        self._queue: deque[tuple[str, Any]] = deque()

    def follow(self, roots: dict[str, Any]) -> None:
        for name in roots:
            self._visit(Place(name, roots, name))
        while self._queue and len(self._seen) < _OBJECTS:
            path, value = self._queue.popleft()
            if asks_for_seed(value) and not _shows_generator(value):
                self._asking.append((path, value))
            for place in _held_by(path, value):
                self._visit(place)
            if isinstance(value, (dict, list)) and len(value) <= _WIDTH:
                self.containers.append(value)
            held = attribute_of(value, "__dict__")
            if isinstance(held, dict) and not isinstance(value, types.FunctionType):
                self.holders.append((path, value))
                self.containers.append(held)

    def seeders(self) -> list[Seeder]:
        """Return what seeds the objects that ask for a seed and hold no generator; those that cannot be seeded are named."""
        found = []
        for path, value in self._asking:
            if any(place.path.startswith((f"{path}.", f"{path}[")) for place in self.places):
                continue
            seeder = seeder_of(path, value)
            if seeder is not None:
                found.append(seeder)
            else:
                self.uncontrollable.append((path, type(value).__name__))
        return found

    @property
    def met(self) -> list[Any] | None:
        """The objects that were met, and the classes and modules that they hold; `None` where some are left."""
        return None if self._queue else [*self._seen.values(), *self._named.values()]

    def _visit(self, place: Place) -> None:
        value = place.current()
        if isinstance(value, (type, types.ModuleType)):
            self._named[id(value)] = value
        if isinstance(value, LEAVES) or id(value) in self._seen or _is_array(value):
            return
        if not self._methods and isinstance(place.container, types.MappingProxyType) and not is_generator(value):
            return
        self._seen[id(value)] = value
        if is_generator(value):
            self.places.append(place)
        elif isinstance(value, (random.SystemRandom, *_ITERATORS)):
            self.uncontrollable.append((place.path, type(value).__name__))
        elif not (isinstance(value, io.IOBase) or _trains(value) or (self._skip is not None and self._skip(value))):
            self._queue.append((place.path, value))


def _shows_generator(value: object) -> bool:
    # It may be shared with another object, under whose path it was found.
    return any(is_generator(place.current()) for place in _held_by_object("", value))


def _trains(value: object) -> bool:
    # What drives the training has generators that are not the data's.
    return callable(getattr(type(value), "train", None)) and not isinstance(value, nn.Module)


def is_generator(value: object) -> bool:
    """Return whether something is a generator of random numbers that can be seeded."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    if isinstance(value, torch.Generator):
        return True
    # Without NumPy loaded there are none of its generators.
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


def seed_generator(generator: object, seed: int) -> None:
    """Seed a generator of any kind; what is none is left alone.

    Args:
        generator: The generator.
        seed: An integer of 63 bits.
    """
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


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of any kind as tensors and plain values, `None` for what is none."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    if not is_generator(generator):
        return None
    legacy = hasattr(generator, "get_state")
    return to_tensors(generator.get_state(legacy=False) if legacy else _bit_generator(generator).state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator into a state of `generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif is_generator(generator):
        numpy = get_numpy()
        assert numpy is not None
        arrays = to_arrays(state, numpy)
        if hasattr(generator, "set_state"):
            generator.set_state(arrays)
        else:
            _bit_generator(generator).state = arrays


def _bit_generator(generator: object) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator
    return getattr(generator, "_bit_generator", generator)


def _global_streams() -> list[Any]:
    streams: list[Any] = [torch.default_generator, getattr(random, "_inst", None)]
    numpy = sys.modules.get("numpy.random.mtrand")
    return [*streams, getattr(numpy, "_rand", None)]


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, (numpy.generic, numpy.dtype)) or (
        isinstance(value, numpy.ndarray) and value.dtype != object
    )


def _is_object_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype == object


def _held_by(path: str, value: Any) -> Iterator[Place]:
    """Yield the places of what an object holds directly."""
    if isinstance(value, Mapping):
        if isinstance(value, dict):
            for key in list(itertools.islice(value, _WIDTH)):
                yield Place(f"{path}[{key!r}]", value, key)
    elif isinstance(value, (set, frozenset)):
        members = list(itertools.islice(value, _WIDTH))
        yield from (Place(f"{path}{{{number}}}", members, number) for number in range(len(members)))
    elif isinstance(value, (list, tuple, deque)):
        yield from (Place(f"{path}[{number}]", value, number) for number in range(min(len(value), _WIDTH)))
    elif _is_object_array(value):
        yield from (Place(f"{path}[{number}]", value.flat, number) for number in range(min(value.size, _WIDTH)))
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from (Place(f"{path}.{name}", parts, name) for name in parts)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        bound = {"__self__": value.__self__, "__func__": getattr(value, "__func__", None)}
        yield from (Place(f"{path}.{name}", bound, name) for name in bound)
    elif isinstance(value, types.FunctionType):
        yield from _held_by_function(path, value)
    else:
        yield from _held_by_object(path, value)


class _Cells(Sequence[Any]):
    """The variables that a function encloses, as they are at each look."""

    def __init__(self, cells: tuple[object, ...]) -> None:
        self.cells = cells

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, number: Any) -> Any:
        return self.cells[number].cell_contents


def _held_by_function(path: str, function: types.FunctionType) -> Iterator[Place]:
    cells = _Cells(function.__closure__ or ())
    for number, name in enumerate(function.__code__.co_freevars):
        yield Place(f"{path}.{name}", cells, number)
    yield Place(f"{path}.__defaults__", {"all": function.__defaults__}, "all")
    yield Place(f"{path}.__kwdefaults__", {"all": function.__kwdefaults__}, "all")
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        helper = isinstance(found, types.FunctionType) and found.__module__ == function.__module__
        if helper or is_generator(found):
            yield Place(f"{function.__module__}.{name}", function.__globals__, name)


def attribute_of(value: Any, name: str) -> Any:
    """Return an attribute of an object, `None` where it has none, or answers with an error of its own, as placeholders of pydantic do."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _held_by_object(path: str, value: object) -> Iterator[Place]:
    held = attribute_of(value, "__dict__")
    if isinstance(held, dict):
        yield from (Place(f"{path}.{name}" if path else name, held, name) for name in list(held))
    if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
        # A model that a collator asks for its inputs draws from torch's own stream; its methods name what makes and loads its weights.
        return
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc", "collections"):
            continue
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held_there = attribute_of(value, name)
            if held_there is not None:
                yield Place(f"{path}.{name}", {name: held_there}, name)
        for name, found in list(vars(kind).items()):
            if isinstance(found, types.FunctionType) or is_generator(found):
                yield Place(f"{path}.{name}", vars(kind), name)
