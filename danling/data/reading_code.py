"""Whether the code that reads samples may look at a random stream without moving it, so that drawing does not show."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, NamedTuple

from .generators import LEAVES, attribute_of, held_objects

SUSPECTS = frozenset(
    (
        # The seed or the state of a stream, from which other numbers may be made.
        *("initial_seed", "getstate", "get_state", "get_rng_state", "get_worker_info", "capture_random_state"),
        *("default_generator", "clone_state", "graphsafe_get_state", "get_bit_generator", "_inst", "_rand"),
        # A state that is put back after drawing.
        *("setstate", "set_state", "set_rng_state", "fork_rng", "preserve_rng_state", "freeze_rng_state"),
        *("preserved_random_state", "restore_random_state", "graphsafe_set_state"),
        # Generators that are made for a sample.
        *("Generator", "default_rng", "RandomState", "SeedSequence", "Random", "SystemRandom"),
        *("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"),
        # Another process that begins with a copy of the streams.
        *("fork", "Pool", "Process", "ProcessPoolExecutor"),
    )
)
"""Names that reading code without own randomness has no use for."""

_FUNCTIONS = 4096
"""Functions that are looked at in all; where there are more, what they do is not known."""
_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "torchdata", "numpy", "danling", "builtins"))
"""Top-level packages that are not looked into: what these draw, they draw from the streams, unless a suspect is named."""
_IMPORT = dis.opmap["IMPORT_NAME"]
_MAKING = frozenset(("__init__", "__new__", "__post_init__", "__set_name__"))
_NEVER = frozenset(
    ("__init_subclass__", "__class_getitem__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__")
)


def may_look_at_streams(roots: Mapping[str, object]) -> bool:
    """Return whether reading may look at a random stream, or make a generator, as far as its code tells.

    The methods of what the roots hold are followed from those that Python calls (`__getitem__`, `__call__`) and `forward` by the names
    that they mention, and so are functions, classes and modules that they name, outside of torch, NumPy and the standard library.

    Args:
        roots: What reads, by name.
    """
    held = held_objects(roots)
    if held is None:
        return True
    kinds = [_kind_of(value) for value in held]
    known = frozenset(map(id, kinds))
    if known in _suspected:
        return True
    reached = _Reached()
    reached.take(held)
    found = reached.find_suspect()
    if found:
        _suspected[known] = kinds
    return found


_suspected: dict[frozenset[int], list[Any]] = {}
"""What datasets held, by kind, whose code may look at a stream: another one that holds the same is not looked at in this process.

To be wrong about that costs time, never another sample. That code does not look is found out anew, since a variable of a module may hold
something else by then.
"""


def _kind_of(value: object) -> Any:
    """Return what the code of an object stands in: its class; a function's own; a class, a module or a routine of C itself."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    return value if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) else type(value)


class _Reached:
    """The functions that may be called, found from name to name."""

    def __init__(self) -> None:
        self._names: set[str] = {"forward"}
        self._methods: dict[str, list[types.FunctionType]] = {}
        """Methods of known classes that nobody has named yet."""
        self._classes: set[type[Any]] = set()
        self._made: set[type[Any]] = set()
        self._queue: deque[types.FunctionType] = deque()
        self._seen: set[Any] = set()
        self._objects: dict[int, Any] = {}
        self._modules: dict[str, types.ModuleType] = {}
        """Modules that something holds; whoever holds one may call what it names of it."""
        self._unknown = False

    def walk(self, roots: Mapping[str, object]) -> None:
        """Take note of what a walk from the roots meets."""
        held = held_objects(roots)
        self._unknown |= held is None
        self.take(held or ())

    def take(self, held: Iterable[object]) -> None:
        """Take note of what is held: functions may be called, and the methods of objects by their names."""
        for value in held:
            if isinstance(value, types.ModuleType):
                self._hold_module(value)
            elif isinstance(value, type):
                self.hold(value, made=True)
            elif id(value) not in self._objects:
                self._objects[id(value)] = value
                self.call(value)
                self.hold(type(value))

    def call(self, value: object) -> None:
        """Take note of something that may be called."""
        function = _function_of(value)
        self._unknown |= _is_suspect(value) or _is_suspect(function)
        if function is not None and function.__code__ not in self._seen and not _is_foreign(function.__module__):
            self._seen.add(function.__code__)
            self._queue.append(function)

    def hold(self, kind: type[Any], *, made: bool = False) -> None:
        """Take note of a class of which there is an instance, or of which one may be made while samples are read."""
        if kind in (self._made if made else self._classes):
            return
        self._unknown |= made and _is_suspect(kind)
        for base in kind.__mro__:
            foreign = _is_foreign(base.__module__)
            if made and base not in self._made:
                self._made.add(base)
                for name in () if foreign else _MAKING:
                    self.call(vars(base).get(name))
            if base in self._classes:
                continue
            self._classes.add(base)
            for name, value in () if foreign else list(vars(base).items()):
                self._hold_method(name, value)

    def _hold_method(self, name: str, value: object) -> None:
        function = _function_of(value)
        if function is None:
            self._meet(value, self._names)
        elif name in _MAKING or name in _NEVER:
            return
        elif name in self._names or (name.startswith("__") and name.endswith("__")):
            self.call(function)
        else:
            self._methods.setdefault(name, []).append(function)

    def find_suspect(self) -> bool:
        """Return whether one of the functions names a suspect, or there are too many to tell."""
        while self._queue and not self._unknown:
            function = self._queue.popleft()
            code = _read(function.__code__)
            if code.has_suspect or len(self._seen) > _FUNCTIONS:
                return True
            names = code.names
            self._follow(function.__globals__, names)
            self._follow_imports(function, code)
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._meet(value, names)
            for cell in function.__closure__ or ():
                try:
                    self._meet(cell.cell_contents, names)
                except ValueError:  # a variable that is not set yet
                    continue
        return self._unknown

    def _follow(self, variables: Mapping[str, object], names: frozenset[str]) -> None:
        for name in names - self._names:
            for method in self._methods.pop(name, ()):
                self.call(method)
        self._names |= names
        for name in names:
            if name in variables:
                self._meet(variables[name], names)
        for module in list(self._modules.values()):
            self._meet(module, names)

    def _follow_imports(self, function: types.FunctionType, code: _Code) -> None:
        for name in code.imported:
            module = _find_module(name, function.__globals__.get("__package__"))
            # What will be imported when the function is called is not known yet.
            self._unknown |= module is None
            self._meet(module, code.names)

    def _hold_module(self, module: types.ModuleType) -> None:
        if module.__name__ not in self._modules and not _is_foreign(module.__name__):
            self._modules[module.__name__] = module
            self._meet(module, self._names)

    def _meet_in_module(
        self, module: types.ModuleType, names: AbstractSet[str], above: frozenset[str] = frozenset()
    ) -> None:
        if _is_foreign(module.__name__) or module.__name__ in above:
            return
        for name in names & vars(module).keys():
            found = vars(module)[name]
            if isinstance(found, types.ModuleType):
                self._meet_in_module(found, names, above | {module.__name__})
            else:
                self._meet(found, names)

    def _meet(self, value: object, names: AbstractSet[str]) -> None:
        if isinstance(value, types.ModuleType):
            self._meet_in_module(value, names)
        elif isinstance(value, type):
            self.hold(value, made=True)
        elif not isinstance(value, LEAVES):
            self.call(value)
            if not isinstance(value, types.FunctionType):
                self._meet_object(value)

    def _meet_object(self, value: object) -> None:
        if id(value) not in self._objects and not isinstance(value, (type, types.ModuleType)):
            self.walk({"met": value})
            self._objects[id(value)] = value


def _is_foreign(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _FOREIGN and module != "__main__"


def _is_suspect(value: object) -> bool:
    """Whether a value is a suspect of another package, under whatever name it was imported or is held."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod, types.MethodType)) else value
    if not (inspect.isroutine(value) or isinstance(value, type)):
        return False
    return attribute_of(value, "__name__") in SUSPECTS and _is_foreign(attribute_of(value, "__module__"))


def _find_module(name: str, package: str | None) -> types.ModuleType | None:
    """Return a module that was imported, also one that is named relative to a package or to one of those around it."""
    parts = (package or "").split(".")
    around = [".".join(parts[: len(parts) - up]) for up in range(len(parts))]
    found = (sys.modules.get(f"{outer}.{name}".strip(".")) for outer in ("", *filter(None, around)))
    return next((module for module in found if module is not None), None)


def _function_of(value: object) -> types.FunctionType | None:
    """Return the function of Python's that a method, a property or a decorated function ends in, `None` for none."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        inner = None
        if isinstance(value, property):
            inner = value.fget
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            inner = value.__func__
        elif not isinstance(value, type):
            inner = _wrapped(value)
        if inner is None:
            return None
        value = inner
    return None


def _wrapped(value: object) -> Any:
    """Return what `functools.lru_cache` and `cached_property` wrap, without asking an object for attributes it makes up."""
    held = getattr(type(value), "__module__", None)
    if held != "functools":
        return None
    return attribute_of(value, "__wrapped__") or attribute_of(value, "func")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a piece of code, and the words that it may hand to `getattr`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _imported_by(code: types.CodeType) -> Iterator[str]:
    """Yield the names of modules that a piece of code imports while it runs."""
    if _IMPORT in code.co_code[::2]:
        yield from (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported_by(constant)


class _Code(NamedTuple):
    """What a piece of code names."""

    names: frozenset[str]
    imported: tuple[str, ...]
    """Modules that it imports while it runs, of those that are looked into."""
    has_suspect: bool


@lru_cache(maxsize=2 * _FUNCTIONS)
def _read(code: types.CodeType) -> _Code:
    # Code never changes, so it is read once in a process, whoever holds it.
    names = frozenset(_names_in(code))
    return _Code(names, tuple(name for name in _imported_by(code) if not _is_foreign(name)), bool(names & SUSPECTS))
