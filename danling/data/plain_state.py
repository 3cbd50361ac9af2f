"""The state of a user's dataset as a checkpoint holds it: tensors and plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_ARRAY, _SCALAR = "__numpy_array__", "__numpy_scalar__"


def is_stateful(value: object) -> bool:
    """Return whether something has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_array(value: object) -> bool:
    """Return whether something is an array or a scalar of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "tolist")


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two plain values are the same, tensors and arrays with their dtypes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if is_array(first):
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and (first == second if _flat(first) else all(map(is_equal, first, second)))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    return bool(first == second)


def _flat(values: Any) -> bool:
    return all(type(value) in (int, float, str, bool) for value in values)


def to_plain(value: Any, path: str = "state") -> object:
    """Return a copy as tensors and plain values; NumPy arrays become tensors, which `from_plain` converts back.

    Args:
        value: What `state_dict` returned.
        path: Where the value is in the state, for the message.

    Raises:
        TypeError: If a checkpoint cannot hold a value; the message names its path and type.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int, float, bool, tuple)):
                raise TypeError(f"{path} has the key {key!r} ({type(key).__name__})")
        return {key: to_plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        items = [to_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
        kind: Any = next(kind for kind in (list, tuple, frozenset, set) if isinstance(value, kind))
        return items if kind is list else kind(items)
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) is not None and value.dtype.kind in "biuf":
        # Stored as 64-bit words whatever the width, since not all functions of torch accept unsigned dtypes.
        wide = value.astype("float64" if value.dtype.kind == "f" else "int64" if value.dtype.kind != "u" else "uint64")
        dtype = torch.float64 if value.dtype.kind == "f" else torch.int64
        words = torch.tensor((wide.view("int64") if value.dtype.kind == "u" else wide).tolist(), dtype=dtype)
        return {_ARRAY if getattr(value, "ndim", 0) else _SCALAR: str(value.dtype), "words": words}
    raise TypeError(f"{path} is {value!r} ({type(value).__name__})")


def from_plain(value: object) -> Any:
    """Return what `to_plain` was given."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        name = value.get(_ARRAY, value.get(_SCALAR))
        if name is None:
            return {key: from_plain(item) for key, item in value.items()}
        import numpy

        words = numpy.asarray(value["words"].tolist(), dtype=str(value["words"].dtype).removeprefix("torch."))
        dtype = numpy.dtype(name)
        array = (words.view("uint64") if dtype.kind == "u" else words).astype(dtype)
        return array if _ARRAY in value else array[()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(from_plain(item) for item in value)
    return value


def check_savable(dataset: Any, split: str) -> None:
    """Raise a `ValueError` if a dataset has a state that a checkpoint cannot hold.

    Args:
        dataset: With `state_dict`.
        split: Name of the split.
    """
    name = type(dataset).__name__
    mend = "Return numbers, text, tensors, arrays, and lists and mappings of them from it, or remove it."
    try:
        state = dataset.state_dict()
    except Exception as error:
        if isinstance(error, TypeError):
            mend = f"If a loader of its own calls it, put that loader into `self.dataloaders`. {mend}"
        raise ValueError(
            f"Expected {name}.state_dict() of split {split!r} to return a state before the first sample is read. "
            f"Received: {type(error).__name__}: {error}. {mend}"
        ) from error
    try:
        to_plain(state, "state_dict()")
    except TypeError as error:
        raise ValueError(
            f"Expected {name}.state_dict() of split {split!r} to be something that a checkpoint can hold. "
            f"Received: {error}. {mend}"
        ) from error
