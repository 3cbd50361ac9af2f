"""Makes a batch of samples, and moves it to the device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map


def collate(samples: Sequence[Any]) -> Any:
    """Return the batch of some samples: that of `torch.utils.data.default_collate`, which stacks tensors at any depth.

    The `Data` of torch_geometric become its `Batch`, at any depth too. The types that a program adds to
    `torch.utils.data._utils.collate.default_collate_fn_map` come first.
    """
    geometric: Any = sys.modules.get("torch_geometric.data")
    if geometric is None:  # it has made no sample
        columns = _columns(samples)
        if columns is None:
            return default_collate(samples)  # type: ignore[no-untyped-call]
        return [default_collate(column) for column in columns]  # type: ignore[no-untyped-call]
    # Of a copy of torch's table, not in it: that would change the batches of loaders that are not the library's.
    known: dict[Any, Any] = dict(default_collate_fn_map)
    known.setdefault(
        geometric.data.BaseData, lambda samples, **_: geometric.Batch.from_data_list(samples)
    )
    return collate_by_type(samples, collate_fn_map=known)


def _columns(samples: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """Return the columns of samples that are plain tuples, which most are: torch asks for each batch what else they could be.

    Returns:
        `None` for other samples, for tuples of different lengths, and where a program collates tuples in its own way.
    """
    if type(samples[0]) is not tuple:
        return None
    # Asked for each batch, since a program may add to the table at any time. A generator would be a call for each kind.
    for kinds in default_collate_fn_map:
        if issubclass(tuple, kinds):
            return None
    try:
        return list(zip(*samples, strict=True))
    except (TypeError, ValueError):
        return None


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
    kind: Any = type(value)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    # A mapping or list of another class, such as the `BatchEncoding` of transformers, may move itself.
    if (
        kind not in (list, tuple, dict)
        and callable(getattr(value, "to", None))
        and not isinstance(value, type)
    ):
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:  # its `to` does not know about blocking
            return value.to(device)
    if isinstance(value, Mapping):
        return kind({key: _move(item, device, non_blocking) for key, item in value.items()})
    if isinstance(value, (tuple, MutableSequence)):
        items = [_move(item, device, non_blocking) for item in value]
        # A named tuple takes its fields one by one.
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value
