"""What an object of the program consists of: attributes, slots, a state, and what a module keeps outside of its state."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from danling.utils.observers import Observer, keeps_state

_HEAP_TYPE = 1 << 9
"""The flag of CPython's types that are made by `class`."""
OF_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""


def outside_state(
    module: nn.Module, state: Mapping[str, object]
) -> dict[str, tuple[nn.Module, str]]:
    """Return buffers that are not in the state of a module, and plain attributes, in which metrics of torchmetrics keep their sums."""
    found = {}
    for prefix, part in module.named_modules():
        own = [key for key in vars(part) if key not in OF_MODULE]
        unsaved = [key for key in part._buffers if f"{prefix}.{key}".strip(".") not in state]
        found.update({f"{prefix}.{key}".strip("."): (part, key) for key in [*own, *unsaved]})
    return found


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def slots_of(kind: type[Any]) -> list[str]:
    """Return the names in `__slots__` of a class and its bases, as they are in its instances."""
    found = []
    for base in reversed(kind.__mro__):
        # One slot may be given as a text, and a name such as `__x` is mangled as it is in a method.
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


@functools.lru_cache(maxsize=1024)
def is_all_attributes(kind: type[Any]) -> bool:
    """Whether objects of a class have nothing but attributes: a class that is written in C may have more."""
    # Written in C, but it has nothing but a `__dict__`.
    if kind is types.SimpleNamespace:
        return True
    slots = slots_of(kind)
    of_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    # The attributes and the weak references of an object may be in front of it.
    most = object.__basicsize__ + 8 * (2 + len(slots))
    has_attributes = bool(slots) or kind.__dictoffset__ != 0
    return of_python and has_attributes and kind.__basicsize__ <= most


def has_state(kind: type[Any]) -> bool:
    """Whether objects of a class return and take a state."""
    # Every observer inherits both methods, empty.
    if issubclass(kind, Observer):
        return keeps_state(kind)
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def is_code(kind: type[Any], name: str) -> bool:
    """Whether a name of a class is a method, a property or a class, which no checkpoint replaces."""
    value = getattr(kind, name, None)
    return callable(value) or hasattr(value, "__set__")


def is_data_or_tokenizer(value: object) -> bool:
    """Whether a value is a dataset or a tokenizer, which a program makes anew: no line names it."""
    names = {kind.__name__ for kind in type(value).__mro__}
    return "Dataset" in names or any("Tokenizer" in name for name in names)
