"""Makes a batch of samples, and moves it to the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map

_Collates = Callable[..., Any]


def collate(samples: Sequence[Any]) -> Any:
    """Return the batch of some samples: that of `torch.utils.data.default_collate`, which stacks tensors at any depth.

    Samples of libraries that are loaded, at any depth too, are put together by the library itself: the `Data` of torch_geometric
    become a `Batch`. The types that a program adds to `torch.utils.data._utils.collate.default_collate_fn_map` come first.
    """
    if sys.modules.keys().isdisjoint(_LIBRARIES):
        return default_collate(samples)  # type: ignore[no-untyped-call]
    return collate_by_type(samples, collate_fn_map={**default_collate_fn_map, **_types_of_libraries()})


def _types_of_libraries() -> dict[Any, _Collates]:
    known: dict[Any, _Collates] = {}
    for name, types_of in _LIBRARIES.items():
        # A library that is not loaded has made no sample.
        module = sys.modules.get(name)
        if module is not None:
            known.update((kind, function) for kind, function in types_of(module) if kind not in default_collate_fn_map)
    return known


def _of_torch_geometric(data: ModuleType) -> list[tuple[type, _Collates]]:
    return [(data.data.BaseData, lambda samples, **_: data.Batch.from_data_list(samples))]


_LIBRARIES: dict[str, Callable[[ModuleType], list[tuple[type, _Collates]]]] = {
    "torch_geometric.data": _of_torch_geometric,
}
"""By module: the types of its samples, and what makes a batch of them."""


def move_to_device(batch: object, device: torch.device, non_blocking: bool = True) -> object:
    """Return a batch with its tensors on `device`.

    Tensors are found in mappings, lists, tuples and named tuples, at any depth; an object with a method `to` is asked
    to move itself; anything else is returned as it is. For the CPU, where loaders put their batches, the batch itself
    is returned.

    Args:
        batch: The batch.
        device: Where to.
        non_blocking: Do not let the host wait for copies from pinned memory
            (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
    """
    return batch if device.type == "cpu" else _move(batch, device, non_blocking)


def _move(value: Any, device: torch.device, non_blocking: bool) -> object:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if type(value) in (list, tuple):
        return type(value)([_move(item, device, non_blocking) for item in value])
    if type(value) is dict:
        return {key: _move(item, device, non_blocking) for key, item in value.items()}
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return _ask_to_move(value, device, non_blocking)
    return _move_container(value, device, non_blocking)


def _ask_to_move(value: Any, device: torch.device, non_blocking: bool) -> object:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:
        # Not everyone who has `to` knows about blocking.
        return value.to(device)


def _move_container(value: object, device: torch.device, non_blocking: bool) -> object:
    kind: Any = type(value)
    if isinstance(value, Mapping):
        return kind({key: _move(item, device, non_blocking) for key, item in value.items()})
    if isinstance(value, (tuple, MutableSequence)):
        items = [_move(item, device, non_blocking) for item in value]
        # A named tuple takes its fields one by one.
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value
