"""`default_convert` as the collate_fn of a loader with batches: it leaves them lists, and is not replaced by what stacks them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_convert

from danling.data import from_datamodule
from danling.data.loader import StreamLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_of_a_stream() -> None:
    assert list(StreamLoader(Stream(), batch_size=2, collate_fn=default_convert)) == [[0, 1], [2, 3]]
    assert torch.equal(next(iter(StreamLoader(Stream(), batch_size=2))), torch.tensor([0, 1]))


def test_of_a_data_module() -> None:
    loader = DataLoader(list(range(4)), batch_size=2, collate_fn=default_convert)
    module = SimpleNamespace(train_dataloader=lambda: loader)
    assert from_datamodule(module)["train"].settings["collate_fn"] is default_convert
    single = DataLoader(list(range(4)), batch_size=None)
    module = SimpleNamespace(train_dataloader=lambda: single)
    assert "collate_fn" not in from_datamodule(module)["train"].settings
