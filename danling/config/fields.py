"""Declared keys of a configuration: type, bounds, default and help text. The only module that imports chanfig."""

from __future__ import annotations

import ast
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from chanfig import Config as Config
from chanfig import FlatDict as FlatDict
from chanfig.io import YamlLoader as YamlLoader
from chanfig.utils import Null as Null

MISSING = object()
_RESERVED = frozenset(
    {"indent", "separator", "convert_mapping", "fallback", "frozen", "parser", "default_factory", "class_defaults_"}
)
SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)
NONE_WORDS = frozenset({"none", "null", "~"})


@dataclass(frozen=True)
class Bounds:
    """The least number allowed, and the greatest; an open bound is not allowed itself."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is within the bounds."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        high = "" if self.high == math.inf else f" and {'<' if self.open_high else '<='} {self.high:.10g}"
        return f"a number {'>' if self.open_low else '>='} {self.low:.10g}{high}"


@dataclass(frozen=True, eq=False)
class OtherNames:
    """What other libraries call the choices of a key, in lower case and without `torch.`."""

    meant: Mapping[str, str | None]

    def read(self, value: object) -> object:
        """Return the choice that a value means."""
        return self.meant.get(str(value).removeprefix("torch.").lower(), value)


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(0, open_low=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]


@dataclass(frozen=True)
class Field:
    """One declared key: its resolved annotation, `Any` when it is unknown; its default, or `MISSING`; the class that declared it first."""

    name: str
    hint: Any
    default: Any
    owner: type

    @property
    def section(self) -> type[Config] | None:
        """The class of the section under the key, `None` when the key has a value."""
        return self.hint if isinstance(self.hint, type) and issubclass(self.hint, Config) else None

    @property
    def is_own(self) -> bool:
        """Whether this library declares the key, and not a user's class."""
        return self.owner.__module__.partition(".")[0] == __name__.partition(".")[0]


def of_chanfig(kind: type) -> bool:
    """Whether chanfig defines a class."""
    return kind.__module__.partition(".")[0] == "chanfig"


@cache
def fields_of(cls: type) -> dict[str, Field]:
    """Return the keys that a configuration class and its bases declare, in order of declaration.

    Annotated class attributes are keys, and so are plain values assigned in the class body: without that, overriding a default without
    repeating its annotation would be ignored. The library's own hint of a key stays when a subclass changes the default.
    """
    fields: dict[str, Field] = {}
    for owner in _owners(cls):
        hints = {
            name: _resolve(text, owner)
            for name, text in inspect.get_annotations(owner).items()
            if not name.startswith("_") and "ClassVar" not in str(text)
        }
        values = {name: value for name, value in vars(owner).items() if _is_plain_default(name, value)}
        for name in (*hints, *(name for name in values if name not in inspect.get_annotations(owner))):
            known, hint = fields.get(name), hints.get(name, Any)
            default = vars(owner).get(name, MISSING if known is None else known.default)
            if known is not None and (name not in hints or known.is_own):
                fields[name] = replace(known, default=default)
            else:
                fields[name] = Field(name, hint, default, owner)
    return fields


def _owners(cls: type) -> list[type]:
    """Return the classes whose bodies declare keys, the bases first."""
    return [owner for owner in reversed(cls.__mro__) if owner not in (object, dict) and not of_chanfig(owner)]


def _is_plain_default(name: str, value: object) -> bool:
    if name.startswith("_") or name.endswith("_") or name in _RESERVED or callable(value):
        return False
    return not hasattr(type(value), "__get__")


def _resolve(text: object, owner: type) -> object:
    if not isinstance(text, str):
        return text
    names = {key: value for key, value in vars(owner).items() if isinstance(value, type)}
    try:
        return eval(text, vars(sys.modules[owner.__module__]), names)
    except Exception:
        return Any  # a name that exists for type checkers only


@cache
def help_texts(cls: type) -> Mapping[str, str]:
    """Return the docstring under each field of a class and its bases, as one line each; empty where there is no source."""
    texts: dict[str, str] = {}
    for owner in _owners(cls):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for statement, follower in pairwise(body):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
            value = follower.value if isinstance(follower, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and isinstance(target, ast.Name):
                texts[target.id] = " ".join(value.value.split())
    return types.MappingProxyType(texts)


def members_of(hint: object) -> tuple[object, ...]:
    """Return the alternatives of a hint, `(hint,)` when it is not a union; bounds stay with their number."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(inner) in (Union, types.UnionType):
        return tuple(member for argument in get_args(inner) for member in members_of(argument))
    return (hint if inner in (int, float) else inner,)


def kind_of(member: object) -> Any:
    """Return the class of one alternative, such as `list` of `list[int]` and `int` of a bounded integer."""
    base = get_args(member)[0] if get_origin(member) is Annotated else member
    return get_origin(base) or base


def conform(value: object, hint: object) -> Any:
    """Return `value` as the type of `hint`, within its bounds.

    Only what loses nothing is converted: `1e3` to an integer, an integer or a numeric string to a float, a path to a string, a tuple to a
    list, and the word none to `None` where a string cannot be meant.

    Raises:
        TypeError: If it has another type; the text says what was expected.
        ValueError: If it is out of bounds, or none of the choices.
    """
    for names in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        value = names.read(value) if isinstance(names, OtherNames) else value
    members = members_of(hint)
    exact = [member for member in members if _is_exactly(value, member)]
    problems = []
    # `None` first, so that the word none of a YAML file is not taken for one of the choices.
    for member in exact or sorted(members, key=lambda one: one is not type(None)):
        try:
            found = _convert(value, member)
        except (TypeError, ValueError):
            continue
        problem = _problem(found, member)
        if problem is None:
            return found
        problems.append(problem)
    raise ValueError(problems[0]) if problems else TypeError(describe(hint))


def _is_exactly(value: object, member: object) -> bool:
    kind = kind_of(member)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(member))
    return isinstance(kind, type) and kind not in SEQUENCES and type(value) is kind


def _problem(value: Any, member: object) -> str | None:
    """Return what was expected when a value is out of bounds or none of the choices, else `None`."""
    if get_origin(member) is Literal and value not in get_args(member):
        return "one of " + ", ".join(repr(choice) for choice in get_args(member))
    bounds = get_args(member)[1:] if get_origin(member) is Annotated else ()
    return next((str(each) for each in bounds if isinstance(each, Bounds) and not each.holds(value)), None)


def _convert(value: Any, member: object) -> object:
    """Return a value as one type, or raise `TypeError` or `ValueError`; a string that is none of the choices stays."""
    kind = kind_of(member)
    if kind is Any:
        return value
    if kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS):
            return None
    elif kind is Literal:
        if _is_exactly(value, member):
            return value
        if value is None and "none" in get_args(member):
            return "none"
        if isinstance(value, str):
            return next((choice for choice in get_args(member) if str(choice).lower() == value.lower()), value)
    elif kind in SEQUENCES:
        return _convert_sequence(value, kind, get_args(member))
    elif kind is bool:
        if type(value).__name__ in ("bool", "bool_"):
            return bool(value)
    elif kind is int:
        if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)  # type: ignore[call-overload]
    elif kind is float:
        if isinstance(value, (Real, str)) and not isinstance(value, bool):
            return float(value)
    elif kind in (str, Path):
        text = value.value if isinstance(value, Enum) else os.fspath(value)
        if isinstance(text, str):
            return kind(text)
    elif kind in (dict, Mapping):
        if isinstance(value, Mapping):
            return value
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
    return " or ".join(dict.fromkeys(_word(member) for member in members_of(hint)))


def _word(member: Any) -> str:
    kind = kind_of(member)
    if kind is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    if kind in SEQUENCES:
        inner = [describe(argument) for argument in get_args(member) if argument is not Ellipsis]
        return f"a list of {inner[0]}" if inner else "a list"
    words = {
        type(None): "none",
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        dict: "a mapping",
    }
    return words.get(kind, "anything" if kind is Any else getattr(kind, "__name__", str(kind)))
