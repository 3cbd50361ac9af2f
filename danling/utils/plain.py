"""Values that any YAML or JSON reader understands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def to_plain(value: Any) -> Any:
    """Return `value` made of dictionaries with string keys, lists, strings, numbers, booleans and `None` only.

    Tensors and arrays become numbers or lists; what has no plain form (a path, a class, an enum) becomes its string.

    Args:
        value: Anything; it is not changed.
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


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON that every reader accepts: NaN and infinities, which JSON lacks, become `null`.

    Args:
        value: Anything `to_plain` takes.
        indent: Spaces a level; `None` for one line.
    """
    return json.dumps(_finite(to_plain(value)), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
