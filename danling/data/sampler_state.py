"""What a sampler of the user's carries from pass to pass: its generators, and attributes that it changes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from .generators import Generators, is_generator
from .plain_state import from_plain, is_array, is_equal, to_plain

_COUNTER = "epoch"
"""The one attribute that is put back of helpers that are no samplers, such as the stages of a pipeline: it counts passes."""
_DEPTH = 3
"""How deep lists are looked into: a bucket sampler has lists of lists."""


def counts_passes(holder: object) -> bool:
    """Whether an object that a loader holds counts passes in an attribute `epoch`; the counters of a run are the run's own.

    Args:
        holder: An object with attributes.
    """
    return type(vars(holder).get(_COUNTER)) is int and not type(holder).__module__.startswith("danling.")


class SamplerState:
    """The state of a sampler, or of an iterable dataset, that has none of its own or one that only fits a pass's middle.

    It is the states of all generators that the sampler holds, and its plain attributes (numbers, text, tensors, arrays, and lists and
    mappings of them) as far as they differ from those of its construction: a counted epoch, a list that is shuffled in
    place. Put back before a pass, the sampler gives that pass again. Datasets and models that it holds are left alone.

    Args:
        sampler: The sampler.
        dataset: The dataset that it draws from, which is not part of it.
    """

    def __init__(self, sampler: object, dataset: object) -> None:
        self._generators = Generators(
            {"sampler": sampler}, skip=lambda held: held is dataset or _belongs_to_others(held)
        )
        self._first = {name: _copy(value) for name, value in self._attributes().items()}
        self._opaque = self._attributes(plain=False)

    def _attributes(self, *, plain: bool = True) -> dict[str, object]:
        return {
            f"{path}.{name}": value
            for path, held, names in self._held()
            for name, value in held.items()
            if name in names and _is_plain(value) is plain
        }

    def _held(self) -> list[tuple[str, dict[str, Any], Collection[str]]]:
        """Return the attributes of each object by path, and the names of those that belong to the state."""
        # Of helpers that are no samplers only the generators count, and a counter of passes: others may rely on their attributes.
        return [
            (path, vars(holder), list(vars(holder)) if hasattr(holder, "__iter__") else (_COUNTER,))
            for path, holder in self._generators.holders
            if hasattr(holder, "__iter__") or counts_passes(holder)
        ]

    def capture(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        self._generators.look_again()
        moved = {
            name: _to_saved(value)
            for name, value in self._attributes().items()
            if name not in self._first or not is_equal(value, self._first[name])
        }
        return {"generators": self._generators.states(), "attributes": moved}

    def opaque_changes(self) -> list[str]:
        """Return the attributes that were replaced since the construction and cannot be saved."""
        found = self._attributes(plain=False)
        return [
            name for name, value in found.items() if self._opaque.get(name) is not value and not is_generator(value)
        ]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put the sampler into a captured state."""
        saved = state["attributes"]
        for path, held, names in self._held():
            for name in [name for name in names if name in held and _is_plain(held[name])]:
                full = f"{path}.{name}"
                if full in saved:
                    # What is so already stays the same object, since an iterator under way may hold it.
                    if not is_equal(_to_saved(held[name]), saved[full]):
                        held[name] = _from_saved(saved[full], held[name])
                elif full in self._first and not is_equal(held[name], self._first[full]):
                    held[name] = _from_saved(_to_saved(self._first[full]), held[name])
            new = [full for full in saved if full.rpartition(".")[0] == path and full.rpartition(".")[2] not in held]
            held.update({full.rpartition(".")[2]: _from_saved(saved[full], None) for full in new})
        self._generators.look_again()
        self._generators.set_states(state["generators"])


def _belongs_to_others(held: object) -> bool:
    return isinstance(held, nn.Module) or (isinstance(held, Dataset) and not isinstance(held, IterableDataset))


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, (type(None), bool, int, float, str, Tensor)):
        return True
    if is_array(value):
        return bool(value.dtype.kind in "biuf")
    if type(value) in (list, tuple):
        return depth > 0 and all(type(item) in (int, float) or _is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(isinstance(key, (int, str)) and _is_plain(value[key], depth - 1) for key in value)
    return False


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _to_saved(value: object) -> Any:
    """Return a copy for a checkpoint: long lists of integers as tensors, arrays as tensors."""
    if isinstance(value, Tensor):
        return {"tensor": value.detach().clone()}
    if is_array(value):
        return {"array": to_plain(value)}
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return {"tensor": torch.tensor(value), "list": True}
    if isinstance(value, (list, tuple)):
        return {"items": [_to_saved(item) for item in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, dict):
        return {"keys": list(value), "values": [_to_saved(item) for item in value.values()]}
    return {"value": value}


def _from_saved(saved: Mapping[str, Any], current: Any) -> object:
    """Return what was saved; in the object that is there, where others may hold it too."""
    if "value" in saved:
        return saved["value"]
    if "keys" in saved:
        return {key: _from_saved(item, None) for key, item in zip(saved["keys"], saved["values"], strict=True)}
    if "items" in saved:
        items = [_from_saved(item, None) for item in saved["items"]]
        return tuple(items) if saved["tuple"] else _refilled(current, items)
    if "array" in saved:
        array = from_plain(saved["array"])
        if is_array(current) and getattr(current, "shape", None) == array.shape and array.ndim:
            current[...] = array
            return current
        return array
    values = saved["tensor"]
    if saved.get("list"):
        return _refilled(current, values.tolist())
    if isinstance(current, Tensor) and current.shape == values.shape and current.dtype == values.dtype:
        with torch.no_grad():
            current.copy_(values)
        return current
    return values.clone()


def _refilled(current: object, items: list[Any]) -> list[Any]:
    if isinstance(current, list):
        current[:] = items
        return current
    return items
