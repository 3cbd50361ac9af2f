"""What is seeded when a map-style dataset is read, and by what."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from support.datasets import Augmented, BatchAugmented, drain
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from danling.data import BatchSource, KeyedDataset, build_dataloader, open_source
from danling.data.keyed import BatchKey, draws_nothing

LENGTH = 12


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
    parts = [read(Augmented(10), (0, 2 + n, [index]), by="sample")[0] for n, index in enumerate((3, 5, 7))]
    assert same(whole, parts)
    by_batch = read(Augmented(10), (0, 2, [3, 5, 7]))
    assert torch.equal(by_batch[0], whole[0]) and not torch.equal(by_batch[1], whole[1])


def test_a_dataset_that_reads_batches_does_so_unless_samples_are_seeded() -> None:
    class Whole(BatchAugmented):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            self.reads.append(-len(indices))
            return super().__getitems__(indices)

    for by, expected in (("batch", [-2, 3, 5]), ("sample", [3, 5])):
        data = Whole(10)
        read(data, (0, 0, [3, 5]), by=by)
        assert data.reads == expected
    assert [int(row[0]) for row in read(Subset(BatchAugmented(10), [4, 5, 6]), (0, 0, [2, 0]))] == [6, 4]


def test_known_quiet_datasets_leave_the_streams_alone() -> None:
    class Quiet(Augmented):
        draws_random = False

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(index)

    tensors = TensorDataset(torch.arange(6))
    quiet: list[Any] = [
        tensors,
        Subset(tensors, [1, 2]),
        ConcatDataset([tensors, tensors]),
        StackDataset(tensors, tensors),
        StackDataset(a=tensors),
        Quiet(6),
        [1, 2, 3],
        range(4),
        torch.arange(3),
    ]
    for dataset in quiet:
        before = torch.get_rng_state(), random.getstate()
        read(dataset, (0, 0, [0, 1]))
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


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


def test_a_declaration_that_is_none_is_refused() -> None:
    class Perhaps(Augmented):
        draws_random = "perhaps"

    with pytest.raises(ValueError, match=r"Expected Perhaps\.draws_random to be True or False.*'perhaps' \(str\)"):
        build_dataloader(Perhaps(4), {}, split="train", train=True, seed=0)


def mixed(samples: list[Any]) -> Tensor:
    rows = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    return torch.stack(rows) + torch.rand(()) + random.random()


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(LENGTH)), Augmented(LENGTH), BatchAugmented(LENGTH)])
@pytest.mark.parametrize("keyed", ["batch", "sample"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_draws_is_resumed(data: Dataset[Any], keyed: str, workers: int) -> None:
    def make() -> BatchSource:
        settings = {"batch_size": 3, "collate_fn": mixed, "keyed": keyed, "num_workers": workers}
        return open_source(build_dataloader(data, settings, split="train", train=True, seed=3), split="train", seed=3)

    whole, first, second = drain(make()), make(), make()
    assert len({float(batch.flatten()[0] % 1) for batch in whole}) == len(whole)
    drain(first, 2)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(11)
    assert same(drain(second), whole[2:])
    for source in (first, second):
        source.close()


class Lazy(Dataset[Tensor]):
    """Makes a generator when the first sample is read, as augmentation libraries do."""

    rng: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        if self.rng is None:
            self.rng = numpy.random.default_rng(torch.initial_seed() % 2**32)
        return torch.tensor([index, self.rng.random()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_made_lazily_in_a_worker_is_keyed(workers: int, persistent: bool) -> None:
    def make() -> BatchSource:
        settings = {"batch_size": 3, "num_workers": workers, "persistent_workers": persistent and workers > 0}
        return open_source(build_dataloader(Lazy(), settings, split="train", train=True, seed=3), split="train", seed=3)

    whole = make()
    batches = drain(whole)
    whole.finish_pass()
    batches += drain(whole)
    for stop in (1, 3, 5):
        resumed = make()
        resumed.load_state_dict({**whole.state_dict(), "epoch": stop // 4, "consumed": stop % 4 * 3})
        assert same(drain(resumed), batches[stop : 4 * (stop // 4 + 1)])
        resumed.close()
    whole.close()
