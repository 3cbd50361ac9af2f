"""Making a batch of samples: as torch does, and for samples of libraries that torch does not know as the library does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

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
