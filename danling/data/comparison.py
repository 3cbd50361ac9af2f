"""Whether ranks have the same data, told from a few values of it, without reading a sample."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from danling.utils.tensors import has_strided_values, is_plain_tensor

_VALUES = 64
_PRIME = 2_654_435_761
"""The golden ratio of 2**32, nearest prime: its multiples are far from each other in an array of any size."""
_MOST_SEARCHED = 2**22
"""Most values of an array in which those other than the most frequent one are searched."""
_DEPTH = 4
_ITEMS = 8
"""Entries of a list or mapping that are looked into."""


def describe(value: Any, depth: int = _DEPTH) -> object:
    """Return the plain values in something, and some of its tensors and arrays, to compare it with another."""
    if isinstance(value, Tensor) and not has_strided_values(value):
        return str(value.dtype), str(value.layout)
    is_of_numpy = type(value).__module__ == "numpy" and hasattr(value, "shape")
    if isinstance(value, Tensor) or is_of_numpy:
        return str(value.dtype), tuple(value.shape), _values_of(value, math.prod(value.shape))
    if hasattr(value, "dtype") and hasattr(value, "ravel"):  # a column of a table
        return str(value.dtype), tuple(value.shape), value.ravel()[:_VALUES].tolist()
    if isinstance(value, (str, bytes, bool, int, float, range, type(None), os.PathLike)):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return [
            (repr(name), describe(item, depth - 1)) for name, item in islice(value.items(), _VALUES)
        ]
    if isinstance(value, (list, tuple)):
        return len(value), [describe(item, depth - 1) for item in value[:_VALUES]]
    return type(value).__name__, describe(getattr(value, "__dict__", {}), depth - 1)


def series_of(dataset: object) -> dict[str, str]:
    """Return some values, from all over them, of the tensors, arrays, lists and ranges in a dataset, by how each is reached from it.

    A dataset has its samples, their indices or the names of their files in these, or in objects that have items. Single values
    are left out, such as a rank or a directory, which may differ; so are the directories of files.
    """
    return dict(_series_in(dataset, "dataset", _DEPTH))


def _series_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if _is_array(value):
        values = _values_at(value, _scattered(math.prod(value.shape)))
        yield path, repr((tuple(value.shape), [_plain(each) for each in values]))
        return
    if type(value) in (list, tuple, range):
        step = max(1, len(value) // _VALUES)
        yield path, repr((len(value), [_plain(each) for each in value[::step]]))
    # An object that has no items has no samples: a dataset may know a module, a logger or the runner.
    if depth == 0 or isinstance(value, Tensor) or not hasattr(type(value), "__getitem__"):
        return
    if type(value) in (list, tuple):
        named = [(f"{path}[{index}]", item) for index, item in enumerate(value[:_ITEMS])]
    elif type(value) is dict:
        named = [(f"{path}[{key!r}]", item) for key, item in islice(value.items(), _ITEMS)]
    else:
        named = [(f"{path}.{name}", item) for name, item in _attributes(value).items()]
    for name, item in named:
        yield from _series_in(item, name, depth - 1)


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes that an object has; its `__getattr__` is not asked."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _values_of(value: Any, size: int) -> list[object]:
    values = _values_at(value, _scattered(size))
    can_be_searched = (
        is_plain_tensor(value) if isinstance(value, Tensor) else value.dtype.kind in "biuf"
    )
    if (
        not can_be_searched
        or not _VALUES < size <= _MOST_SEARCHED
        or values.count(values[0]) < len(values)
    ):
        return values
    # Nearly all values may be zero, as those of words in a bag or of one class out of many: the others tell such arrays apart.
    differs = (value != values[0]).reshape(-1)
    places = differs.nonzero() if isinstance(value, Tensor) else differs.nonzero()[0]
    found: list[int] = places.reshape(-1)[:_VALUES].tolist()
    return [*values, *found, *_values_at(value, found)]


def _scattered(size: int) -> Sequence[int]:
    """Return places all over an array: neither the first ones nor those at equal distances, which may be the dark corners of images."""
    if size <= _VALUES:
        return range(size)
    return [_PRIME * number % size for number in range(_VALUES)]


def _values_at(value: Any, places: Sequence[int]) -> list[object]:
    """Return values of a tensor or array, each read by its place: another form of the whole may be a copy of it."""
    if not value.shape:
        return [value.tolist()]
    index: list[list[int]] = []
    for length in reversed(value.shape):
        index.insert(0, [place % length for place in places])
        places = [place // length for place in places]
    values: list[object] = value[tuple(index)].tolist()
    return values


def _plain(value: object) -> object:
    if isinstance(value, (str, os.PathLike)):
        return os.path.basename(os.fspath(value))
    return (
        value
        if isinstance(value, (bool, int, float, complex, bytes, type(None)))
        else type(value).__name__
    )


def _is_array(value: Any) -> bool:
    if isinstance(value, Tensor):
        return has_strided_values(value) and is_plain_tensor(value) and value.dim() > 0
    return type(value).__module__ == "numpy" and hasattr(value, "reshape") and value.ndim > 0
