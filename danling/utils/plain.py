"""Values that any YAML or JSON reader understands."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def to_plain(value: object) -> object:
    """Return `value` made of dictionaries with string keys, lists, strings, numbers, booleans and `None` only.

    Tensors and arrays become numbers or lists; what has no plain form (a path, a class, an enum) becomes its string.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((to_plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return str(value)


def flatten(values: Mapping[str, object], prefix: str = "", *, keeps_empty: bool = False) -> dict[str, Any]:
    """Return nested mappings as one, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and (value or not keeps_empty):
            flat.update(flatten(value, f"{prefix}{name}.", keeps_empty=keeps_empty))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
