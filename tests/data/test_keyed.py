"""What is seeded when a map-style dataset is read, and by what."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from support.datasets import Augmented, BatchAugmented
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from danling.data import build_dataloader
from danling.data.keyed import KeyedDataset, draws_nothing
from danling.data.sampler import BatchKey


def read(dataset: Dataset[Any], key: tuple[int, int, list[int]], **settings: Any) -> Any:
    return KeyedDataset(dataset, settings.pop("seed", 0), **settings).__getitems__(BatchKey(*key))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return torch.equal(torch.stack(left), torch.stack(right))


def test_a_batch_depends_on_seed_split_epoch_position_and_rank_only() -> None:
    key = (1, 4, [3, 5])
    batch = read(Augmented(10), key)
    torch.rand(5), random.random(), numpy.random.rand()
    assert same(read(Augmented(20), key), batch)
    others = [
        read(Augmented(10), (2, 4, [3, 5])),
        read(Augmented(10), (1, 6, [3, 5])),
        *(
            read(Augmented(10), key, **other)
            for other in ({"seed": 1}, {"split": "val"}, {"ranks": (0,)}, {"ranks": (1,)})
        ),
    ]
    noise = torch.stack([torch.stack(one)[:, 1] for one in (batch, *others)])
    assert len(noise.unique()) == noise.numel()


def test_by_sample_each_has_its_own_position_whatever_the_batch() -> None:
    whole = read(Augmented(10), (0, 2, [3, 5, 7]), by="sample")
    parts = [
        read(Augmented(10), (0, 2 + n, [index]), by="sample")[0]
        for n, index in enumerate((3, 5, 7))
    ]
    assert same(whole, parts)
    by_batch = read(Augmented(10), (0, 2, [3, 5, 7]))
    assert torch.equal(by_batch[0], whole[0]) and not torch.equal(by_batch[1], whole[1])


def test_dataset_reads_whole_batches_unless_samples_are_seeded() -> None:
    class Whole(BatchAugmented):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            self.reads.append(-len(indices))
            return super().__getitems__(indices)

    for by, expected in (("batch", [-2, 3, 5]), ("sample", [3, 5])):
        data = Whole(10)
        read(data, (0, 0, [3, 5]), by=by)
        assert data.reads == expected
    assert [int(row[0]) for row in read(Subset(BatchAugmented(10), [4, 5, 6]), (0, 0, [2, 0]))] == [
        6,
        4,
    ]


def test_only_datasets_known_to_draw_nothing_leave_the_streams_alone() -> None:
    class Quiet(Augmented):
        draws_random = False

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(index)

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return (super().__getitem__(index)[0] + torch.rand(()),)

    class Perhaps(Augmented):
        draws_random = "perhaps"

    tensors, noisy = TensorDataset(torch.arange(6)), Noisy(torch.arange(6))
    quiet: list[Any] = [
        tensors,
        Subset(tensors, [1, 2]),
        ConcatDataset([tensors, tensors]),
        StackDataset(a=tensors),
    ]
    for dataset in (
        *quiet,
        StackDataset(tensors, tensors),
        Quiet(6),
        [1, 2, 3],
        range(4),
        torch.arange(3),
    ):
        before = torch.get_rng_state(), random.getstate()
        read(dataset, (0, 0, [0, 1]))
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    for other in (noisy, Subset(noisy, [0]), ConcatDataset([tensors, noisy]), StackDataset(noisy)):
        assert not draws_nothing(other)
    with pytest.raises(
        ValueError, match=r"Expected Perhaps\.draws_random to be True or False.*'perhaps' \(str\)"
    ):
        build_dataloader(Perhaps(4), {}, split="train", train=True, seed=0)


@pytest.mark.parametrize("by", ["batch", "sample"])
def test_a_batch_sampler_may_give_an_empty_batch(by: str) -> None:
    assert read(Augmented(10), (0, 2, []), by=by) == []
