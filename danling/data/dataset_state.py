"""The state of a dataset with `state_dict`: as a checkpoint holds it, in this process and in the copies that workers have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, get_worker_info

from .order import OrderedDataset

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
    """Return a copy as tensors and plain values; NumPy arrays become tensors, which `from_plain` converts back."""
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
    """Raise a `ValueError` if a dataset has a state that a checkpoint cannot hold."""
    name = type(dataset).__name__
    mend = "Return numbers, text, tensors, arrays, and lists and mappings of them from it, or remove it."
    try:
        state = dataset.state_dict()
    except Exception as error:
        if isinstance(error, TypeError):
            mend = f"If a loader of that library calls it, put that loader into `self.dataloaders`. {mend}"
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


def parts_of(dataset: Any) -> dict[str, object] | None:
    """Return what a dataset of torch or of the library that wraps others reads, by how it is reached; `None` for any other."""
    kind = type(dataset)
    if isinstance(dataset, OrderedDataset):
        return dataset.parts()
    if kind is Subset:
        return {".dataset": dataset.dataset}
    if kind in (ConcatDataset, StackDataset):
        held = dataset.datasets
        return {
            f".datasets[{key!r}]": part for key, part in (held.items() if isinstance(held, dict) else enumerate(held))
        }
    return None


def stateful_parts(dataset: Any, path: str = "dataset") -> dict[str, object]:
    """Return what has a state in a dataset, by path: itself, or what torch's wrappers hold."""
    parts = parts_of(dataset)
    if parts is None:
        return {path: dataset} if is_stateful(dataset) else {}
    return {name: held for way, part in parts.items() for name, held in stateful_parts(part, f"{path}{way}").items()}


class DatasetState:
    """Follows the state of a dataset to where batches are consumed, which workers run ahead of.

    Each worker has a copy of the dataset that changes as it reads; with every batch it hands over its state. The copies are made anew of
    this process's dataset for each pass.
    """

    def __init__(self, dataset: object, split: str, num_workers: int) -> None:
        self._parts = stateful_parts(dataset)
        self._split = split
        self._num_workers = num_workers
        for part in self._parts.values():
            check_savable(part, split)
        self.of_workers: dict[int, dict[str, Any]] = {}
        """States of the workers at the position, by id; of those that have given a batch in this pass."""
        self._next = 0
        self._ahead: deque[tuple[int, dict[str, Any]]] = deque()
        self._found: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self, *, first: bool) -> None:
        """Prepare an iteration."""
        self._ahead.clear()
        # New workers begin with the first one, whose turn it is.
        self.of_workers, self._next = {} if first else self._turned(), 0
        if first:
            self._found = get_states(self._parts)

    def _turned(self) -> dict[int, dict[str, Any]]:
        turned = {(worker - self._next) % (self._num_workers or 1): worker for worker in self.of_workers}
        return {worker: self.of_workers[turned[worker]] for worker in sorted(turned)}

    def unwrapped(self, iterator: Iterator[Any]) -> Iterator[object]:
        """Yield the batches of what `Stamped` workers give, and remember their states."""
        for worker, states, batch in iterator:
            self._ahead.append((worker, states))
            yield batch

    def advance(self, batches: int) -> None:
        """Take note that so many batches were consumed."""
        for _ in range(min(batches, len(self._ahead))):
            worker, states = self._ahead.popleft()
            self.of_workers[worker] = states
            self._next = (worker + 1) % self._num_workers

    def state_dict(self) -> dict[str, Any]:
        """Return the states, and how many workers there are."""
        main = get_states(self._parts)
        return {
            "main": main,
            "found": main if self._found is None else self._found,
            "workers": {str(worker): states for worker, states in self._turned().items()},
            "num_workers": self._num_workers,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, within: bool) -> None:
        """Put the dataset into a saved state; workers are given theirs when they start."""
        changed = any(not is_equal(states, state["found"]) for states in (state["main"], *state["workers"].values()))
        if within and changed and state["num_workers"] != self._num_workers:
            raise ValueError(
                f"Expected num_workers={state['num_workers']} for split {self._split!r}, as when its position was saved "
                f"within an epoch: the dataset's own state had changed, of which each worker keeps a copy. Received: "
                f"num_workers={self._num_workers}. Restore the number, or exclude 'dataloaders' from loading."
            )
        missing = sorted(self._parts.keys() ^ state["main"].keys())
        if missing:
            raise ValueError(
                f"Expected the datasets of split {self._split!r} that have a state to be the same as when it was saved. "
                f"Received: a difference in {', '.join(missing)}. Restore the dataset, or exclude 'dataloaders' from "
                "loading."
            )
        set_states(self._parts, state["main"])
        self._found = state["found"]
        self._ahead.clear()
        same = state["num_workers"] == self._num_workers
        self.of_workers = {int(worker): states for worker, states in state["workers"].items()} if same else {}
        self._next = 0


class Stamped:
    """Makes a batch, and hands over the state of the dataset with it."""

    def __init__(self, collate_fn: Callable[[Any], Any], dataset: object) -> None:
        self.collate_fn = collate_fn
        self.dataset = dataset

    def __call__(self, samples: object) -> tuple[int, dict[str, Any], Any]:
        """Return the worker's id, the states by path, and the batch."""
        info = get_worker_info()
        assert info is not None
        batch = self.collate_fn(samples)
        return info.id, get_states(stateful_parts(self.dataset)), batch


def get_states(parts: Mapping[str, Any]) -> dict[str, object]:
    """Return copies of the states of the parts of a dataset, by path."""
    return {path: to_plain(part.state_dict(), path) for path, part in parts.items()}


def set_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put the parts of a dataset into saved states, by path."""
    for path, part in parts.items():
        if path in states:
            part.load_state_dict(from_plain(states[path]))
