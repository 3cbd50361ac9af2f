from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.datasets import Augmented, BatchAugmented
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from danling.data import KeyedDataset
from danling.data.keyed import draws_nothing


def test_item_depends_on_seed_epoch_and_index_only() -> None:
    keyed = KeyedDataset(Augmented(10), 0)
    item = keyed[(1, 3)]
    torch.rand(5)
    random.random()
    keyed[(2, 3)]
    assert torch.equal(keyed[(1, 3)], item)
    assert torch.equal(KeyedDataset(Augmented(20), 0)[(1, 3)], item)
    for other in (keyed[(2, 3)], keyed[(1, 4)], KeyedDataset(Augmented(10), 1)[(1, 3)]):
        assert (other[1:] != item[1:]).all()


def test_batch_is_the_items() -> None:
    keyed = KeyedDataset(Augmented(10), 0)
    batch = keyed.__getitems__([(1, 3), (1, 5), (1, 7)])
    assert all(torch.equal(a, keyed[(1, index)]) for a, index in zip(batch, (3, 5, 7), strict=True))


def test_batch_reader_is_seeded_by_its_first_index() -> None:
    keyed = KeyedDataset(BatchAugmented(10), 0)
    first = keyed.__getitems__([(1, 3), (1, 5)])
    again = keyed.__getitems__([(1, 3), (1, 6)])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1][1:], again[1][1:])


def test_subset_is_seeded_item_by_item() -> None:
    keyed = KeyedDataset(Subset(Augmented(10), [4, 5, 6]), 0)
    batch = keyed.__getitems__([(0, 1), (0, 2)])
    assert torch.equal(batch[1], keyed[(0, 2)])


def test_subset_of_a_batch_reader_reads_batches() -> None:
    keyed = KeyedDataset(Subset(BatchAugmented(10), [4, 5, 6]), 0)
    assert [int(row[0]) for row in keyed.__getitems__([(0, 2), (0, 0)])] == [6, 4]


def test_known_quiet_datasets_leave_the_streams_alone() -> None:
    tensors = TensorDataset(torch.arange(6))
    quiet = [
        tensors,
        Subset(tensors, [1, 2]),
        ConcatDataset([tensors, tensors]),
        StackDataset(tensors, tensors),
        StackDataset(a=tensors),
        [1, 2, 3],
        range(4),
        torch.arange(3),
    ]
    for dataset in quiet:
        before = torch.get_rng_state()
        KeyedDataset(dataset, 0).__getitems__([(0, 0), (0, 1)])
        assert torch.equal(torch.get_rng_state(), before)


def test_what_may_draw_is_not_taken_for_quiet() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return (super().__getitem__(index)[0] + torch.rand(()),)

    noisy = Noisy(torch.arange(6))
    for dataset in (
        noisy,
        Subset(noisy, [0]),
        ConcatDataset([TensorDataset(torch.arange(2)), noisy]),
        StackDataset(noisy),
    ):
        assert not draws_nothing(dataset)


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(8)), Augmented(8), BatchAugmented(8)])
def test_a_collate_function_that_draws_is_keyed(dataset: Dataset[Any]) -> None:
    keyed = KeyedDataset(dataset, 0, collates=True)
    keyed.__getitems__([(0, 3), (0, 5)])
    drawn = torch.rand(())
    torch.rand(3)
    keyed.__getitems__([(0, 3), (0, 5)])
    assert torch.rand(()) == drawn
