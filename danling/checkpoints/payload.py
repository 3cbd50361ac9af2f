"""The form of a payload: what a reader may rely on in a checkpoint whose files are as they were written.

The values come from a file, which anybody may have written. Every reader calls `check_sections` before anything of a payload is used, so
that a defect is the error of a damaged checkpoint, and a run falls back to the one before it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointDamaged

LISTS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (list, tuple, torch.Size, deque, set, frozenset)
}
DICTS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (dict, OrderedDict, defaultdict, Counter)
}
"""Containers that an attribute is saved as, by the name of the kind."""

# Counters become 64-bit integers of torch, also a sum of two of them.
_LARGEST = 1 << 62
_LONGEST = 1 << 10_000
"""Python refuses to print an integer of more than 4,300 digits."""
_LONGEST_DTYPE = 32
_SCALARS = (type(None), bool, int, float, str)
_COUNTERS = (
    "global_step",
    "micro_step",
    "epoch",
    "samples",
    "skipped_updates",
    "consecutive_skips",
)
_ATTEMPTS = ("world_size", "data_replicas", "restart_count", "attempts")
_KINDS_OF_ARRAYS = "biufcmMSU"
_NUMBERS_OF_KEYS = frozenset(
    {
        "b1",
        *(f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8) if kind + str(size) != "f1"),
    }
)

_SECTIONS_OF_SETTINGS = ("checkpoint", "compile", "dataloader", "optim", "parallel", "scheduler")
"""Sections of settings whose entries are read."""
_LISTS_OF_SETTINGS = ("train_splits", "evaluate_splits", "secret_keys")

Check = Callable[[Any, str], None]
"""Raises `_Defect` for a value, at a path, that does not have a form."""


class _Defect(Exception):
    """Says what is expected at which path of a payload, and what is there."""

    def __init__(self, path: str, expected: str, value: object) -> None:
        kind = type(value).__name__
        shown = (
            f"{value!r:.60}"
            if type(value) in (bool, int, float, str) and not _is_long(value)
            else kind
        )
        super().__init__(f"Expected {expected} as {path:.200}. Received: {shown}")


def check_sections(payload: Mapping[str, object], source: Path) -> None:
    """Refuse a payload whose sections do not have the form in which this library writes them; a missing one is no defect here.

    Raises:
        CheckpointDamaged: If it does not.
    """
    try:
        # Other sections, such as those of the user, are what torch's safe reader lets through.
        for name, check in _SECTIONS.items():
            if payload.get(name) is not None:
                check(payload[name], name)
    except _Defect as defect:
        raise CheckpointDamaged(f"{defect}, in {source}. Use another checkpoint.") from None
    # Settings and attributes are checked level by level, by functions that call each other.
    except RecursionError:
        raise CheckpointDamaged(
            f"Expected values of fewer levels. Received: {source}, with more."
        ) from None


# Values


def _is_long(value: object) -> bool:
    return isinstance(value, int) and abs(value) >= _LONGEST


def _require(fits: bool, path: str, expected: str, value: object) -> None:
    if not fits:
        raise _Defect(path, expected, value)


def _count(value: object, path: str) -> None:
    _require(
        type(value) is int and 0 <= value < _LARGEST, path, "a whole number from 0 to 2^62", value
    )


def _number(value: object, path: str) -> None:
    # `type`, as everywhere here: a boolean is an instance of int.
    is_float = type(value) is float or (type(value) is int and abs(value) < _LARGEST)
    _require(is_float, path, "a number", value)


def _text(value: object, path: str) -> None:
    _require(type(value) is str, path, "a text", value)


def _flag(value: object, path: str) -> None:
    _require(type(value) is bool, path, "true or false", value)


def _scalar(value: object, path: str) -> None:
    _require(type(value) in _SCALARS and not _is_long(value), path, "a plain value", value)


def _optional(check: Check) -> Check:
    def of(value: object, path: str) -> None:
        if value is not None:
            check(value, path)

    return of


def _mapping(value: object, path: str) -> None:
    _require(isinstance(value, Mapping), path, "a mapping", value)


def _named(check: Check) -> Check:
    """Return the check of a mapping by texts, with values of one form."""

    def of(value: Any, path: str) -> None:
        _mapping(value, path)
        for key, item in value.items():
            _text(key, f"a key of {path}")
            check(item, f"{path}.{key}")

    return of


def _entries(checks: Mapping[str, Check]) -> Check:
    """Return the check of a mapping in which some entries have a form."""

    def of(value: Any, path: str) -> None:
        _mapping(value, path)
        for name, check in checks.items():
            if name in value:
                check(value[name], f"{path}.{name}")

    return of


def _by_index(check: Check) -> Check:
    """Return the check of a mapping by whole numbers, each written as a text."""

    def of(value: Any, path: str) -> None:
        _mapping(value, path)
        for key, item in value.items():
            is_index = type(key) is str and key.removeprefix("-").isdecimal() and len(key) < 20
            _require(is_index, f"a key of {path}", "a number as a text", key)
            check(item, f"{path}.{key}")

    return of


def _mark(value: Any, path: str) -> None:
    _require(isinstance(value, (list, tuple)) and len(value) == 2, path, "two numbers", value)
    for number in value:
        _require(type(number) is int and abs(number) < _LARGEST, path, "whole numbers", number)
    _count(value[0], path)


# Settings and progress

# The values of metrics are those of the user.
_results = _by_index(_named(_mapping))
_scores = _entries(
    {
        "scores": _by_index(_number),
        "best_index": _optional(_number),
        "best_score": _optional(_number),
    }
)
_train = _entries({**dict.fromkeys(_COUNTERS, _count), "weight_reference": _optional(_number)})
_elastic = _entries(
    {
        **dict.fromkeys(_ATTEMPTS, _count),
        "micro_batch_size": _optional(_count),
        "arithmetic": _mapping,
    }
)


def _settings(value: Any, path: str) -> None:
    """Check that settings are plain values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _scalar(key, f"a key of {path}")
            _settings(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _settings(item, f"{path}.{index}")
    else:
        _scalar(value, path)


def _texts(value: Any, path: str) -> None:
    is_list = isinstance(value, (list, tuple)) and all(type(item) is str for item in value)
    _require(is_list or type(value) is str, path, "a text, or a list of texts", value)


def _runner(value: Any, path: str) -> None:
    _mapping(value, path)
    for key in value:
        _text(key, f"a key of {path}")
    _settings(value, path)
    _optional(_count)(value.get("seed"), f"{path}.seed")
    for name in _SECTIONS_OF_SETTINGS:
        _optional(_mapping)(value.get(name), f"{path}.{name}")
    for name in _LISTS_OF_SETTINGS:
        _optional(_texts)(value.get(name), f"{path}.{name}")
    left_out = (value.get("checkpoint") or {}).get("exclude_from_loading")
    _optional(_texts)(left_out, f"{path}.checkpoint.exclude_from_loading")


def _position(value: Any, path: str) -> None:
    if value is not None:
        _mapping(value, path)
        _entries({"ranks": _named(_mapping)})(value, path)


# Attributes, buffers, `requires_grad` and observers: an entry has a value and maybe the ranks without it, or a value for each rank


def _kept(check: Check) -> Check:
    def of_entry(value: Any, path: str) -> None:
        _mapping(value, path)
        if "value" in value:
            check(value["value"], path)
            without = value.get("without", [])
            is_list = isinstance(without, (list, tuple)) and all(
                type(rank) is int for rank in without
            )
            _require(is_list, f"{path}.without", "a list of ranks", without)
            return
        _count(value.get("of"), f"{path}.of")
        _named(check)(value.get("ranks"), f"{path}.ranks")

    return _named(of_entry)


def _tensor(value: object, path: str) -> None:
    _require(isinstance(value, Tensor), path, "a tensor", value)


def _moved(value: Mapping[str, Any], path: str) -> None:
    # A tensor on an accelerator, which is saved on the CPU, or one of a class.
    _tensor(value.get("value"), path)
    _text(value.get("device"), f"the device of {path}")
    _optional(_text)(value.get("class"), f"the class of {path}")


def _buffer(value: Any, path: str) -> None:
    is_node = isinstance(value, Mapping) and value.get("kind") in ("tensor", "shard", "deleted")
    _require(is_node or value is None or isinstance(value, Tensor), path, "a tensor", value)
    _node(value, path)


def _node(value: Any, path: str) -> None:
    """Check an encoded value; see `danling.training.attributes`."""
    # A plain value is written as it is; anything else is a mapping that names its kind.
    if isinstance(value, Tensor):
        return
    if not isinstance(value, Mapping):
        _scalar(value, path)
        return
    kind: Any = value.get("kind")
    _text(kind, f"the kind of {path}")
    check = _NODES.get(kind)
    if check is None:
        raise _Defect(path, "a value of a kind that this version knows", kind)
    check(value, path)


def _bytes(value: Mapping[str, Any], path: str) -> None:
    data = value.get("value")
    _require(
        isinstance(data, Tensor) and data.dtype == torch.uint8 and data.ndim == 1,
        path,
        "bytes",
        data,
    )


def _array(value: Mapping[str, Any], path: str) -> None:
    import numpy

    _bytes(value, path)
    name = value.get("dtype")
    _require(
        type(name) is str and len(name) < _LONGEST_DTYPE, f"{path}.dtype", "a dtype of NumPy", name
    )
    try:
        dtype = numpy.dtype(name)
    # NumPy parses some texts as Python, such as those of structured dtypes.
    except (TypeError, ValueError, SyntaxError):
        raise _Defect(f"{path}.dtype", "a dtype of NumPy", name) from None
    _require(
        dtype.kind in _KINDS_OF_ARRAYS and dtype.itemsize > 0,
        f"{path}.dtype",
        "a dtype of numbers or texts",
        name,
    )
    shape: Any = value.get("shape")
    _require(isinstance(shape, (list, tuple)), f"{path}.shape", "a shape", shape)
    for size in shape:
        _count(size, f"{path}.shape")
    # Checked here, where it is the error of a checkpoint; NumPy would raise its own at the restore.
    fits = math.prod(shape) * dtype.itemsize == value["value"].numel()
    _require(fits, f"{path}.shape", "the shape of so many bytes", shape)
    _require(
        not (value["kind"] == "scalar" and shape), f"{path}.shape", "the shape of a scalar", shape
    )


def _items(
    value: Mapping[str, Any], path: str, check: Check = _node, *, count: int | None = None
) -> None:
    items: Any = value.get("items")
    # Items with tensors are a mapping by number: the state has names above its tensors (`dcp_index`).
    if isinstance(items, Mapping):
        numbered = {str(number) for number in range(len(items))}
        _require(items.keys() == numbered, f"{path}.items", "values by number", items)
        for number in range(len(items)):
            check(items[str(number)], f"{path}[{number}]")
    else:
        _require(isinstance(items, list), f"{path}.items", "a list", items)
        for number, item in enumerate(items):
            _scalar(item, f"{path}[{number}]")
            check(item, f"{path}[{number}]")
    _require(count is None or len(items) == count, f"{path}.items", "a value for each key", items)


def _list(value: Mapping[str, Any], path: str) -> None:
    if value["kind"] in ("set", "frozenset"):
        _members(value, path)
        return
    check = _count if value["kind"] == "Size" else _node
    _items(value, path, check)
    _optional(_count)(value.get("maxlen"), f"{path}.maxlen")


def _keys(value: Mapping[str, Any], path: str, check: Check) -> None:
    keys: Any = value.get("keys")
    _require(isinstance(keys, list), f"{path}.keys", "a list", keys)
    for key in keys:
        check(key, f"a key of {path}")
    _items(value, path, count=len(keys))


def _members(value: Mapping[str, Any], path: str) -> None:
    items: Any = value.get("items")
    _require(isinstance(items, list), f"{path}.items", "a list", items)
    for item in items:
        _key(item, path)


def _key(value: Any, path: str) -> None:
    """Check a key of a dictionary, or an item of a set."""
    if not isinstance(value, Mapping):
        _scalar(value, path)
        return
    kind = value.get("kind")
    check = _KEYS.get(kind) if type(kind) is str else None
    if check is None:
        raise _Defect(path, "a plain value, or a kind of key that this version knows", kind)
    check(value, path)


def _bytes_of_key(value: Mapping[str, Any], path: str) -> None:
    items = value.get("items")
    is_byte = isinstance(items, list) and all(
        type(item) is int and 0 <= item < 256 for item in items
    )
    _require(is_byte, path, "bytes", items)


def _number_of_key(value: Mapping[str, Any], path: str) -> None:
    name, item = value.get("dtype"), value.get("item")
    known = type(name) is str and name.lstrip("<>|=") in _NUMBERS_OF_KEYS
    _require(known, f"{path}.dtype", "a dtype of numbers", name)
    _require(type(item) in (bool, int, float) and not _is_long(item), path, "a number", item)


def _enum(value: Mapping[str, Any], path: str) -> None:
    _text(value.get("class"), f"the class of {path}")
    _optional(_text)(value.get("name"), f"{path}.name")
    flags = value.get("value")
    _require(
        flags is None or (type(flags) is int and not _is_long(flags)),
        f"{path}.value",
        "a whole number",
        flags,
    )


def _dict(value: Mapping[str, Any], path: str) -> None:
    _keys(value, path, _key)
    _optional(_text)(value.get("factory"), f"{path}.factory")


def _object(value: Mapping[str, Any], path: str) -> None:
    _text(value.get("class"), f"the class of {path}")
    _keys(value, path, _text)
    _optional(_texts)(value.get("deleted"), f"{path}.deleted")


def _stateful(value: Mapping[str, Any], path: str) -> None:
    _text(value.get("class"), f"the class of {path}")
    _node(value.get("state"), f"{path}.state")
    if value["kind"] == "stateful" and "more" in value:
        more = value["more"]
        _require(
            isinstance(more, Mapping) and more.get("kind") == "dict",
            f"{path}.more",
            "a mapping",
            more,
        )
        _keys(more, f"{path}.more", _text)


def _complex(value: Mapping[str, Any], path: str) -> None:
    parts: Any = value.get("value")
    _require(isinstance(parts, (list, tuple)) and len(parts) == 2, path, "two numbers", parts)
    for part in parts:
        _number(part, path)


def _state(value: Any, path: str) -> None:
    """Check the encoded state of an observer, which is a mapping."""
    is_mapping = isinstance(value, Mapping) and value.get("kind") == "dict"
    _require(is_mapping, path, "a state, which is a mapping", value)
    _node(value, path)


_KEYS: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
    "tuple": _members,
    "frozenset": _members,
    "bytes": _bytes_of_key,
    "scalar": _number_of_key,
    "enum": _enum,
    "same": lambda value, path: _text(value.get("path"), f"{path}.path"),
}

# By the kind of a node: how it is checked. `danling.training.attributes` writes and reads the kinds.
_NODES: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
    "left": lambda value, path: None,
    "deleted": lambda value, path: None,
    "same": lambda value, path: _text(value.get("path"), f"{path}.path"),
    "tensor": _moved,
    "shard": lambda value, path: _tensor(value.get("value"), path),
    "complex": _complex,
    "enum": _enum,
    "bytes": _bytes,
    "bytearray": _bytes,
    "array": _array,
    "scalar": _array,
    "generator": _stateful,
    "stateful": _stateful,
    "object": _object,
    "namedtuple": _list,
    **dict.fromkeys(LISTS, _list),
    **dict.fromkeys(DICTS, _dict),
}

_SECTIONS: Mapping[str, Check] = {
    "runner": _runner,
    "model": _mapping,
    "ema": _entries({"weights": _mapping}),
    "state": _entries(
        {
            "train": _train,
            "elastic": _elastic,
            "rng": _entries({"seed": _count}),
            "results": _results,
            "scores": _scores,
            "open_result": _named(_mapping),
            "metrics_mark": _optional(_mark),
            "metric_attributes": _named(_named(_named(_mapping))),
            "pass_settings": _kept(_node),
            "made_in_training": _named(_text),
            "asked_options": _entries({"options": _named(_text), "class": _text, "kind": _text}),
        }
    ),
    "dataloaders": _named(_position),
    "requires_grad": _kept(_flag),
    "buffers": _kept(_buffer),
    "attributes": _kept(_node),
    "observers": _kept(_state),
}
