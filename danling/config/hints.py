"""What a type hint of a declared key means: its alternatives and bounds, the values that it takes, and how it is described."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)
_NONE_WORDS = frozenset({"none", "null", "~"})


@dataclass(frozen=True)
class Bounds:
    """The least number allowed, and the greatest; an open bound is not allowed itself."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is within the bounds."""
        above = value > self.low or (value == self.low and not self.open_low)
        below = value < self.high or (value == self.high and not self.open_high)
        return above and below

    def __str__(self) -> str:
        above = ">" if self.open_low else ">="
        below = "<" if self.open_high else "<="
        text = f"a number {above} {self.low:.10g}"
        return text if self.high == math.inf else f"{text} and {below} {self.high:.10g}"


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(0, open_low=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]


def members_of(hint: object) -> tuple[object, ...]:
    """Return the alternatives of a hint, `(hint,)` when it is not a union; bounds stay with their number."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(inner) in (Union, types.UnionType):
        return tuple(member for argument in get_args(inner) for member in members_of(argument))
    # Only numbers have bounds.
    return (hint if inner in (int, float) else inner,)


def kind_of(member: object) -> Any:
    """Return the class of one alternative, such as `list` of `list[int]` and `int` of a bounded integer."""
    base = get_args(member)[0] if get_origin(member) is Annotated else member
    return get_origin(base) or base


def conform(value: object, hint: object) -> Any:
    """Return `value` as the type of `hint`, within its bounds.

    Only what loses nothing is converted: `1e3` to an integer, an integer or a numeric string to a float, a path to a string, a tuple to a
    list, and the word none to `None` where a string cannot be meant. A mapping in an annotation has what other libraries call the choices.

    Raises:
        TypeError: If it has another type; the text says what was expected.
        ValueError: If it is out of bounds, or none of the choices.
    """
    for names in get_args(hint)[1:]:
        if isinstance(names, Mapping):
            value = names.get(str(value).removeprefix("torch.").lower(), value)
    problem = None
    # The member that the value is of already comes first, so that 1 stays an integer where a number may be one. Then comes `None`, so that
    # the word none of a YAML file is not taken for one of the choices.
    members = sorted(
        members_of(hint),
        key=lambda member: (not _is_exactly(value, member), member is not type(None)),
    )
    for member in members:
        try:
            found: Any = _convert(value, member)
        except (TypeError, ValueError):
            continue
        bounds = [
            each
            for each in get_args(member)[1:]
            if isinstance(each, Bounds) and not each.holds(found)
        ]
        if get_origin(member) is Literal and found not in get_args(member):
            problem = problem or "one of " + ", ".join(repr(choice) for choice in get_args(member))
        elif bounds:
            problem = problem or str(bounds[0])
        else:
            return found
    raise ValueError(problem) if problem else TypeError(describe(hint))


def _is_exactly(value: object, member: object) -> bool:
    kind = kind_of(member)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(member))
    return kind not in SEQUENCES and type(value) is kind


def _convert(value: Any, member: object) -> object:
    """Return a value as one type, or raise `TypeError` or `ValueError`; a string that is none of the choices stays."""
    kind = kind_of(member)
    if kind is Any:
        return value
    if kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() in _NONE_WORDS):
            return None
    elif kind is Literal:
        if _is_exactly(value, member):
            return value
        # `null` in a file means the choice of this name.
        if value is None and "none" in get_args(member):
            return "none"
        if isinstance(value, str):
            return next(
                (choice for choice in get_args(member) if str(choice).lower() == value.lower()),
                value,
            )
    elif kind in SEQUENCES:
        return _convert_sequence(value, kind, get_args(member))
    elif kind is bool:
        # That of NumPy too, which has the second name before NumPy 2.
        if type(value).__name__ in ("bool", "bool_"):
            return bool(value)
    elif kind is int:
        # `1e3` is a float to Python, and an integer to who writes it.
        if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)  # type: ignore[call-overload]
    elif kind is float:
        if isinstance(value, (Real, str)) and not isinstance(value, bool):
            return float(value)
    elif kind in (str, Path):
        text = value.value if isinstance(value, Enum) else os.fspath(value)
        if isinstance(text, str):
            return kind(text)
    elif not isinstance(kind, type) or isinstance(value, kind):
        return value
    elif issubclass(kind, Enum):
        return kind(value)
    raise TypeError


def _convert_sequence(value: Any, kind: Any, arguments: tuple[object, ...]) -> object:
    if isinstance(value, str) and arguments and str in members_of(arguments[0]):
        value = [value]
    if not isinstance(value, SEQUENCES):
        raise TypeError
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise TypeError
        return tuple(conform(item, hint) for item, hint in zip(value, arguments))
    return kind(conform(item, arguments[0] if arguments else Any) for item in value)


def describe(hint: object) -> str:
    """Return a hint in words, for an error or the help."""
    words = {
        type(None): "none",
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        dict: "a mapping",
        Any: "anything",
    }
    described = []
    for member in members_of(hint):
        kind, arguments = kind_of(member), get_args(member)
        if kind is Literal:
            described += [repr(choice) for choice in arguments]
        elif kind in SEQUENCES:
            described.append(f"a list of {describe(arguments[0])}" if arguments else "a list")
        else:
            described.append(str(words.get(kind) or getattr(kind, "__name__", kind)))
    return " or ".join(dict.fromkeys(described))
