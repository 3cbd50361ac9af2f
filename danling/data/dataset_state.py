"""The state of a dataset with `state_dict`, as a checkpoint has it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from danling.utils.encoding import (
    ARRAYS,
    MISSING,
    SETS,
    decode_array,
    decode_set,
    encode_array,
    encode_key,
    encode_set,
    is_of_numpy,
)

from .order import OrderedDataset

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_DICT = "dict"
_NAMES_OF_ARRAY = {"kind", "dtype", "shape", "value"}
_OLDER_ARRAY = "__numpy_array__"
_WATCHED = (bool, int, float, complex, str, bytes, type(None))
_MOST_WATCHED = 64
"""Numbers and texts of a dataset that are compared at a save."""
_DEEPEST = 3
_OF_THE_PROGRAM = (ModuleType, type, FunctionType, BuiltinFunctionType, logging.Logger)
"""What a dataset may refer to without that being a part of it: its attributes change for other reasons, and are many."""


def is_stateful(value: object) -> bool:
    """Return whether something has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two states of `to_plain` are the same, tensors with their dtypes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            is_equal(first[key], second[key]) for key in first
        )
    # A NaN is not equal to itself, and would count as a change at each look.
    are_nans = first != first and second != second
    return bool(first == second) or are_nans


def to_plain(value: Any, path: str = "state") -> object:
    """Return a copy as tensors and plain values. NumPy arrays and sets are encoded as those of attributes; `from_plain` converts back."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, (str, int, float, tuple))]
        if odd:
            raise TypeError(f"{path} has the key {odd[0]!r} ({type(odd[0]).__name__})")
        items = {key: to_plain(item, f"{path}[{key!r}]") for key, item in value.items()}
        # So that no reader takes a mapping of the user's for an encoded value.
        return {"kind": _DICT, "pairs": list(items.items())} if "kind" in items else items
    if isinstance(value, (set, frozenset)):
        node = encode_set(value)
        if MISSING in node["items"]:
            item = next(item for item in value if encode_key(item) is MISSING)
            raise TypeError(f"{path} has the item {item!r} ({type(item).__name__})")
        return node
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        listed = [to_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
        return listed if isinstance(value, list) else tuple(listed)
    array = encode_array(value) if is_of_numpy(value) else None
    if array is None:
        raise TypeError(f"{path} is {value!r} ({type(value).__name__})")
    return {**array, "value": array["value"].clone()}


def from_plain(value: object) -> Any:
    """Return what `to_plain` was given."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        kind, names = value.get("kind"), value.keys()
        # Compared with tuples: a value of the user's under this name may have no hash.
        if kind in ARRAYS and names == _NAMES_OF_ARRAY:
            return decode_array(value)
        if kind in tuple(SETS) and names == {"kind", "items"}:
            return decode_set(value)
        if kind == _DICT and names == {"kind", "pairs"}:
            return {key: from_plain(item) for key, item in value["pairs"]}
        if _OLDER_ARRAY in value:
            return _older_array(value)
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(from_plain(item) for item in value)
    return value


def _older_array(value: Mapping[str, Any]) -> Any:
    """Return an array or a number of NumPy as checkpoints before 0.2.0 have it."""
    import numpy

    # An empty array has a tensor of another dtype.
    is_empty = value["data"].dtype is not torch.uint8
    data = b"" if is_empty else bytes(value["data"].tolist())
    array = numpy.frombuffer(bytearray(data), numpy.dtype(value[_OLDER_ARRAY])).reshape(
        value["shape"]
    )
    return array if value["shape"] else array[()]


def check_savable(dataset: Any, split: str) -> None:
    """Raise a `ValueError` if a dataset has a state that a checkpoint cannot hold."""
    try:
        to_plain(dataset.state_dict(), "state_dict()")
    except Exception as error:
        raise ValueError(
            f"Expected {type(dataset).__name__}.state_dict() of split {split!r} to return, before the first sample is read, what a "
            f"checkpoint can contain. Received: {type(error).__name__}: {error}. Return numbers, text, tensors, arrays, and lists and "
            "mappings of them from it, or remove it. If a loader of that library calls it, put that loader into `self.dataloaders`."
        ) from error


def check_read_by_place(dataset: object, split: str, *, by_place: bool = True) -> None:
    """Refuse a table or a mapping whose `[index]` is a column, or goes by labels or keys. May be called on one rank.

    Args:
        dataset: The dataset.
        split: Name of the split, for messages.
        by_place: Whether it is read by indices from 0. If not, labels and keys are meant.

    Raises:
        ValueError: If the dataset, or a part of it, is one.
    """
    _check_part(dataset, f"datasets[{split!r}]", by_place=by_place)


def _check_part(dataset: object, path: str, *, by_place: bool) -> None:
    parts = parts_of(dataset)
    for way, part in (parts or {}).items():
        # The indices of a Subset may be labels or keys.
        _check_part(part, f"{path}{way}", by_place=type(dataset) is not Subset)
    if parts is not None or isinstance(dataset, Dataset):
        return
    kind: Any = type(dataset)
    table: Any = dataset
    if hasattr(kind, "iloc") and hasattr(kind, "ndim"):
        if table.ndim == 1 and (not by_place or list(table.index) == list(range(len(table)))):
            return
        reads = "a column" if table.ndim > 1 else "looked up by label"
        fix = (
            "Write TensorDataset(torch.tensor(frame[inputs].to_numpy()), torch.tensor(frame[target].to_numpy())), or a Dataset that "
            "reads `frame.iloc[index]`."
        )
    elif isinstance(dataset, Mapping) and by_place and not _has_places(dataset):
        reads = f"looked up among its keys {list(dataset)[:5]}"
        fix = (
            "Write StackDataset(**entries) of torch.utils.data if each entry has a part of all samples, list(entries.values()) if it "
            "is a sample, or assign one of the entries."
        )
    else:
        return
    raise ValueError(
        f"Expected {path} to have a sample at each index from 0. Received: a {kind.__name__}, of which [index] is {reads}. {fix}"
    )


def _has_places(mapping: Mapping[Any, object]) -> bool:
    """Whether a mapping has something at each index from 0."""
    kind = type(mapping)
    looks_up = getattr(kind, "__missing__", None) in (None, defaultdict.__missing__)
    if isinstance(mapping, dict) and kind.__getitem__ is dict.__getitem__ and looks_up:
        return all(index in mapping for index in range(len(mapping)))
    # A table of columns may also have rows, such as a TensorDict, which answers no `in`; a cache makes what it does not have.
    try:
        mapping[0]
    except (KeyError, TypeError):
        return False
    except Exception:
        return True  # its own error, which names the sample where it is read
    return True


def parts_of(dataset: Any) -> dict[str, object] | None:
    """Return what a dataset of torch or of the library that wraps others reads, by how it is reached; `None` for any other."""
    kind = type(dataset)
    if isinstance(dataset, OrderedDataset):
        return dataset.parts()
    if kind is Subset:
        return {".dataset": dataset.dataset}
    if kind in (ConcatDataset, StackDataset):
        datasets = dataset.datasets
        named = datasets.items() if isinstance(datasets, dict) else enumerate(datasets)
        return {f".datasets[{key!r}]": part for key, part in named}
    return None


def _leaves(dataset: object, path: str = "") -> dict[str, object]:
    """Return the datasets that samples are read from, by path: itself, or those in torch's wrappers."""
    parts = parts_of(dataset)
    if parts is None:
        return {path: dataset}
    return {
        name: leaf
        for way, part in parts.items()
        for name, leaf in _leaves(part, f"{path}{way}").items()
    }


def stateful_parts(dataset: object) -> dict[str, object]:
    """Return the datasets with a state in a dataset, by path."""
    return {path: leaf for path, leaf in _leaves(dataset, "dataset").items() if is_stateful(leaf)}


def get_states(parts: Mapping[str, Any]) -> dict[str, object]:
    """Return copies of the states of the parts of a dataset, by path."""
    return {path: to_plain(part.state_dict(), path) for path, part in parts.items()}


def set_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put the parts of a dataset into saved states, by path."""
    for path, part in parts.items():
        part.load_state_dict(from_plain(states[path]))


# What changes in a dataset without a state


def _stateless(dataset: object) -> dict[str, object]:
    """Return the datasets without a state in a dataset, by path."""
    return {path: leaf for path, leaf in _leaves(dataset).items() if not is_stateful(leaf)}


def plain_attributes(dataset: object) -> dict[str, object]:
    """Return the numbers and texts that are attributes of the datasets without a state in a dataset, by path: 64 of each at most."""
    found = {}
    for path, leaf in _stateless(dataset).items():
        plain = (
            (name, value)
            for name, value in getattr(leaf, "__dict__", {}).items()
            if type(value) in _WATCHED
        )
        found.update({f"{path}.{name}": value for name, value in islice(plain, _MOST_WATCHED)})
    return found


def changed_attributes(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    """Return the paths in two answers of `plain_attributes` whose values differ."""
    missing = object()
    return {
        path
        for path in {**before, **now}
        if not is_equal(before.get(path, missing), now.get(path, missing))
    }


def set_epoch_of(dataset: Any, epoch: int) -> set[str]:
    """Call `set_epoch` of a dataset, and return the paths of the plain attributes that this has changed."""
    before = plain_attributes(dataset)
    dataset.set_epoch(epoch)
    return changed_attributes(before, plain_attributes(dataset))


class DatasetCopies:
    """What a dataset was like when workers got copies of it, to find changes of which they do not know.

    Found are attributes with another value or object, tensors that torch changed in place, and containers of another length, up to three
    levels deep. An array that NumPy changes in place, and an entry of a long list, are not. Modules, classes, functions and loggers are
    compared as objects.
    """

    def __init__(self, dataset: object) -> None:
        self._marks = _marks(dataset)

    def differ_from(self, dataset: object) -> bool:
        """Return whether the dataset has changed since."""
        return not _are_same(self._marks, _marks(dataset))


class _Same(NamedTuple):
    """An object that is compared by identity."""

    value: object


def _marks(dataset: object) -> list[tuple[Any, ...]]:
    return [_mark(leaf, _DEEPEST) for leaf in _stateless(dataset).values()]


def _mark(value: Any, depth: int) -> tuple[Any, ...]:
    """Return what tells a value from a later one."""
    if type(value) in _WATCHED:
        return (value,)
    if isinstance(value, Tensor):
        # One that was made in inference mode counts no changes.
        version = None if value.is_inference() else value._version
        return _Same(value), version
    if isinstance(value, _OF_THE_PROGRAM):
        return (_Same(value),)
    inner: Any = ()
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        if depth and len(value) <= _MOST_WATCHED:
            inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return _Same(value), len(value), *(_mark(item, depth - 1) for item in inner)
    if depth:
        inner = getattr(value, "__dict__", {}).items()
    return _Same(value), *((name, *_mark(item, depth - 1)) for name, item in inner)


def _are_same(first: Any, second: Any) -> bool:
    if isinstance(first, _Same) and isinstance(second, _Same):
        return first.value is second.value
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_are_same, first, second))
    return is_equal(first, second)
