"""The JSON schema of a configuration, made of the declared keys, their types, bounds and help texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

from .hints import SEQUENCES, Bounds, kind_of, members_of
from .inputs import help_texts
from .runner_config import RunnerConfig
from .sections import MISSING, ClosedSection, Field, fields_of

_TYPES: dict[Any, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration file."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of a danling run",
    }
    # What the keys of `${...}` lead to is known when the file is read, and users add their own sections.
    return {**head, **_section(RunnerConfig, is_open=True)}


def _section(kind: type, *, is_open: bool) -> dict[str, Any]:
    texts = help_texts(kind)
    properties = {}
    for name, field in fields_of(kind).items():
        about = {"description": texts[name]} if name in texts else {}
        properties[name] = {**about, **_key(field)}
    return {"type": "object", "properties": properties, "additionalProperties": is_open}


def _key(field: Field) -> dict[str, Any]:
    if field.section is not None:
        # A section may be null in a file: it then has its defaults.
        inner = _section(field.section, is_open=not issubclass(field.section, ClosedSection))
        return {**inner, "type": ["object", "null"]}
    found = _any_of(_member(member) for member in members_of(field.hint))
    default = field.default
    is_plain = default is None or isinstance(default, (bool, int, str))
    is_finite = isinstance(default, float) and math.isfinite(default)
    # JSON has no infinity, so that such a default is left out.
    if default is not MISSING and (is_plain or is_finite):
        found["default"] = default
    return found


def _any_of(members: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found = list(members)
    # A member of any type leaves nothing to check.
    if {} in found:
        return {}
    # A value may be taken from another key or the environment.
    found.append({"type": "string", "pattern": r"\$\{[^${}]+\}"})
    return {"anyOf": found}


def _member(member: object) -> dict[str, Any]:
    kind, arguments = kind_of(member), get_args(member)
    if kind is Literal:
        return {"enum": list(arguments)}
    if kind in SEQUENCES:
        items = _any_of(_member(item) for item in members_of(arguments[0])) if arguments else {}
        return {"type": "array", "items": items}
    if kind not in _TYPES:
        return {}
    found: dict[str, Any] = {"type": _TYPES[kind]}
    for bounds in arguments[1:]:
        if isinstance(bounds, Bounds):
            found["exclusiveMinimum" if bounds.open_low else "minimum"] = bounds.low
            if math.isfinite(bounds.high):
                found["exclusiveMaximum" if bounds.open_high else "maximum"] = bounds.high
    if kind is float:
        # YAML has infinity as .inf, which JSON has no number for.
        return {"anyOf": [found, {"enum": ["inf"]}]}
    return found
