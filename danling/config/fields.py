"""Declared keys of a configuration: type, bounds, default and help text. The only module that imports chanfig."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
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
class Minimum:
    """A bound from below.

    Args:
        value: The least number allowed.
        exclusive: The number itself is not allowed.
    """

    value: float
    exclusive: bool = False

    def problem(self, value: object) -> str | None:
        """Return what was expected when `value` breaks the bound, else `None`."""
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        number = float(value)
        fits = number > self.value if self.exclusive else number >= self.value
        return None if fits else f"a number {'>' if self.exclusive else '>='} {self.value:g}"


PositiveInt = Annotated[int, Minimum(1)]
NonNegativeInt = Annotated[int, Minimum(0)]
PositiveFloat = Annotated[float, Minimum(0, exclusive=True)]
NonNegativeFloat = Annotated[float, Minimum(0)]


@dataclass(frozen=True)
class Field:
    """One declared key.

    Args:
        name: The key.
        hint: The resolved annotation; `Any` when it is unknown.
        text: The annotation as it was written.
        default: The default, or `MISSING` when the class gives none.
        owner: The class that declared the key first.
    """

    name: str
    hint: Any
    text: str
    default: Any
    owner: type

    @property
    def section(self) -> type[Config] | None:
        """The class of the section that the key holds, `None` when it holds a value."""
        return self.hint if isinstance(self.hint, type) and issubclass(self.hint, Config) else None

    def problem(self, value: object) -> str | None:
        """Return what was expected when `value` is out of bounds or not one of the choices, else `None`."""
        return _problem(value, self.hint)


def of_chanfig(kind: type) -> bool:
    """Whether chanfig defines a class."""
    return kind.__module__.partition(".")[0] == "chanfig"


@cache
def fields_of(cls: type) -> dict[str, Field]:
    """Return the keys that a configuration class and its bases declare, in order of declaration.

    Annotated class attributes are keys, and so are plain values assigned in the class body: without that, overriding a
    default without repeating its annotation would be ignored in silence. The library's own hint of a key stays when a subclass
    changes the default.

    Args:
        cls: A class derived from `chanfig.Config`.
    """
    fields: dict[str, Field] = {}
    for owner in reversed(cls.__mro__):
        if owner is object or owner is dict or of_chanfig(owner):
            continue
        for name, text in inspect.get_annotations(owner).items():
            if not name.startswith("_") and "ClassVar" not in str(text):
                _declare(fields, name, _resolve(text, owner), _written(text), vars(owner).get(name, MISSING), owner)
        for name, value in vars(owner).items():
            if name not in inspect.get_annotations(owner) and _is_plain_default(name, value):
                _declare(fields, name, Any, "", value, owner)
    return fields


def _declare(fields: dict[str, Field], name: str, hint: object, text: str, default: object, owner: type) -> None:
    known = fields.get(name)
    if known is None:
        fields[name] = Field(name, hint, text, default, owner)
        return
    keep = hint is Any or known.owner.__module__.split(".")[0] == __name__.split(".")[0]
    if default is MISSING:
        default = known.default
    fields[name] = Field(
        name, known.hint if keep else hint, known.text if keep else text, default, known.owner if keep else owner
    )


def _is_plain_default(name: str, value: object) -> bool:
    if name.startswith("_") or name.endswith("_") or name in _RESERVED or callable(value):
        return False
    return not hasattr(type(value), "__get__")


def _written(text: object) -> str:
    return text if isinstance(text, str) else getattr(text, "__name__", str(text))


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
    for owner in reversed(cls.__mro__):
        if owner is not object and owner is not dict and not of_chanfig(owner):
            texts.update(_own_help_texts(owner))
    return types.MappingProxyType(texts)


def _own_help_texts(owner: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    texts: dict[str, str] = {}
    for statement, follower in pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = follower.value if isinstance(follower, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and isinstance(targets[0], ast.Name):
            texts[targets[0].id] = " ".join(value.value.split())
    return texts


def members_of(hint: object) -> tuple[object, ...]:
    """Return the alternatives of a hint, `(hint,)` when it is not a union; bounds are taken off."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for argument in get_args(hint) for member in members_of(argument))
    return (type(None) if hint is None else hint,)


def conform(value: object, hint: object) -> Any:
    """Return `value` as the type of `hint`.

    Only what loses nothing is converted: `1e3` to an integer, an integer or a numeric string to a float, a path to a string,
    a tuple to a list, and the word none to `None` where a number is expected.
    """
    members = members_of(hint)
    for member in members:
        if _is_exactly(value, member):
            return value
    # `None` first, so that the word none of a YAML file is not taken for one of the choices.
    for member in sorted(members, key=lambda one: one is not type(None)):
        try:
            return _convert(value, member)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"Expected {describe(hint)}.")


def _is_exactly(value: object, member: object) -> bool:
    if get_origin(member) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(member))
    return isinstance(member, type) and member not in SEQUENCES and type(value) is member


def _convert(value: Any, member: object) -> object:
    """Return a value as one type, or raise `TypeError` or `ValueError`."""
    kind, arguments = get_origin(member) or member, get_args(member)
    if member is Any:
        return value
    if kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS):
            return None
    elif kind is Literal:
        if value is None and "none" in arguments:
            return "none"
        if isinstance(value, str):
            # A wrong choice is a string all the same; `validate` names it together with the choices.
            return next((choice for choice in arguments if str(choice).lower() == value.lower()), value)
    elif kind in SEQUENCES:
        return _convert_sequence(value, kind, arguments)
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


def _problem(value: object, hint: object) -> str | None:
    if get_origin(hint) is Annotated:
        base, *bounds = get_args(hint)
        found = (bound.problem(value) for bound in bounds if isinstance(bound, Minimum))
        return next((problem for problem in found if problem), None) or _problem(value, base)
    if get_origin(hint) in (Union, types.UnionType):
        problems = [_problem(value, member) for member in get_args(hint) if _concerns(value, member)]
        return None if None in problems or not problems else problems[0]
    if get_origin(hint) is Literal and value not in get_args(hint):
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    return None


def _concerns(value: object, member: object) -> bool:
    """Whether a value could be meant for this member of a union, so that `None` does not excuse a wrong string."""
    base = get_args(member)[0] if get_origin(member) is Annotated else member
    if get_origin(base) is Literal:
        return isinstance(value, str)
    kind = get_origin(base) or base
    return not isinstance(kind, type) or isinstance(value, kind) or (kind is float and isinstance(value, Real))


def describe(hint: object) -> str:
    """Return a hint in words, for an error or the help."""
    return " or ".join(dict.fromkeys(_word(member) for member in members_of(hint)))


def _word(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    if get_origin(member) in SEQUENCES:
        inner = [describe(argument) for argument in get_args(member) if argument is not Ellipsis]
        return f"a list of {inner[0]}" if inner else "a list"
    words = {type(None): "none", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    fallback = "a mapping" if get_origin(member) is dict else getattr(member, "__name__", str(member))
    return words.get(member, "anything" if member is Any else fallback)
