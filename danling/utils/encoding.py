"""NumPy arrays, sets and keys of dictionaries in a checkpoint: tensors, plain values, and mappings of these with an entry `kind`.

`torch.load(weights_only=True)` reads them. Saved with these functions are attributes of a runner, observers, datasets with a state, and
what an optimizer adds to its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

MISSING = object()
"""Marks a value that has no encoding, or is not there."""
SCALARS = (type(None), bool, int, float, str)
ARRAYS = ("array", "scalar")
"""Kinds of NumPy's values."""
SETS: Mapping[str, Callable[[Any], Any]] = {"set": set, "frozenset": frozenset}
"""What makes sets, by their kind."""
_TUPLES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "frozenset": frozenset}
_NUMBERS = ("b", "i", "u", "f")
_ENCODED = "biufcmMSU"


def is_of_numpy(value: Any) -> bool:
    """Whether a value is an array or a number of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def without_numpy(value: Any) -> Any:
    """Return nested values with numbers and arrays of NumPy as numbers and lists of Python."""
    if is_of_numpy(value):
        return value.tolist()
    if type(value) in (dict, Counter):
        return type(value)({without_numpy(key): without_numpy(item) for key, item in value.items()})
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value


def numpy_as(value: Any, own: Any) -> Any:
    """Return nested values with the types of NumPy that another value has in the same places."""
    if type(value) in (list, tuple) and isinstance(own, (list, tuple)) and len(value) == len(own):
        return type(value)(map(numpy_as, value, own))
    if not is_of_numpy(own) or type(value) not in (bool, int, float, complex, list):
        return value
    import numpy

    array = numpy.asarray(value, dtype=own.dtype)
    # A dtype that does not hold the value is that of another one.
    return (array if type(value) is list else array[()]) if array.tolist() == value else value


def encode_array(value: Any) -> dict[str, Any] | None:
    """Return an array or a number of NumPy as bits with dtype and shape; `None` for a dtype of objects."""
    import numpy

    if value.dtype.kind not in _ENCODED:
        return None
    # torch warns of arrays that cannot be written, so these are copied.
    flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    return {
        "kind": kind,
        "dtype": value.dtype.str,
        "shape": list(value.shape),
        "value": torch.from_numpy(flat),
    }


def decode_array(node: Mapping[str, Any]) -> Any:
    """Return what `encode_array` was given, an array as a copy."""
    import numpy

    bits = node["value"].numpy().tobytes()
    array = numpy.frombuffer(bits, dtype=numpy.dtype(node["dtype"])).reshape(node["shape"])
    return array[()] if node["kind"] == "scalar" else array.copy()


def _no_encoding(_: Any) -> Any:
    return MISSING


def encode_set(value: Any, other: Callable[[Any], Any] = _no_encoding) -> dict[str, Any]:
    """Return a set or a frozen set, its items in one order; an item without an encoding is `MISSING`.

    Args:
        value: The set.
        other: Encodes an item that is no scalar, tuple, frozen set, `bytes` or number of NumPy, or returns `MISSING`.
    """
    kind = "frozenset" if isinstance(value, frozenset) else "set"
    members = [encode_key(item, other) for item in value]
    return {"kind": kind, "items": _ordered(members)}


def decode_set(node: Mapping[str, Any], other: Callable[[Any], Any] = _no_encoding) -> Any:
    """Return what `encode_set` was given."""
    return SETS[node["kind"]](decode_key(item, other) for item in node["items"])


def encode_key(key: Any, other: Callable[[Any], Any] = _no_encoding) -> Any:
    """Return a key of a dictionary, or an item of a set, as plain values; `MISSING` where it has no encoding."""
    own = type(key)
    if own in SCALARS:
        return key
    if own in (tuple, frozenset):
        parts = [encode_key(part, other) for part in key]
        if MISSING in parts:
            return MISSING
        if own is frozenset:
            parts = _ordered(parts)
        return {"kind": own.__name__, "items": parts}
    if own is bytes:
        return {"kind": "bytes", "items": list(key)}
    if own.__module__ == "numpy" and getattr(getattr(key, "dtype", None), "kind", "") in _NUMBERS:
        return {"kind": "scalar", "dtype": key.dtype.str, "item": key.item()}
    return other(key)


def decode_key(node: Any, other: Callable[[Any], Any] = _no_encoding) -> Any:
    """Return the key of a dictionary, or the item of a set, that `encode_key` was given."""
    if not isinstance(node, dict):
        return node
    kind = node["kind"]
    if kind in _TUPLES:
        return _TUPLES[kind](decode_key(part, other) for part in node["items"])
    if kind == "bytes":
        return bytes(list(node["items"]))  # of a number, `bytes` makes so many zeros
    if kind == "scalar":
        import numpy

        dtype = numpy.dtype(node["dtype"])
        if dtype.kind not in _NUMBERS:
            # Such as `numpy.void`, which makes so many zeros of a number.
            raise ValueError(f"a key of the dtype {dtype}, which is no number")
        return dtype.type(node["item"])
    return other(node)


def _ordered(parts: list[Any]) -> list[Any]:
    """Return parts in one order. None of them has a tensor."""
    return sorted(parts, key=lambda part: (type(part).__name__, str(part)))
