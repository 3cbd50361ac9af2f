from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import Augmented, Stream, drain, ids, share_of, source_over, stateful_loader
from support.processes import run_outcomes, run_processes
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

from danling import TorchRunner
from danling.data import BatchSource, DataLoader, Share, open_source, seed_streams

LENGTH = 22


def source_of(loader: Any, **settings: Any) -> BatchSource:
    return open_source(loader, **{"split": "train", "seed": 3, **share_of(loader), **settings})


def test_data_ranks_shuffle_differently_and_ranks_of_one_coordinate_alike() -> None:
    def order(rank: int) -> list[int]:
        loader = TorchDataLoader(Augmented(LENGTH), batch_size=4, shuffle=True)
        return ids(drain(source_of(loader, rank=rank, world_size=2)))

    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize(
    "setting",
    [
        {"persistent_workers": True},
        {"prefetch_factor": 3},
        {"timeout": 5},
        {"multiprocessing_context": "spawn"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_loader_whose_workers_were_taken_away_is_read_in_this_process(
    setting: dict[str, Any],
) -> None:
    loader = TorchDataLoader(Augmented(LENGTH), batch_size=4, num_workers=2, **setting)
    loader.num_workers = 0
    assert ids(drain(source_of(loader))) == list(range(LENGTH))


class EveryOther:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist()[self.rank :: 2])


class InBatches(BatchSampler):
    """Divides the batches in place of the sampler that it was made with."""

    def __init__(self, sampler: EveryOther) -> None:
        super().__init__(SequentialSampler(range(LENGTH)), 4, False)
        self.own = BatchSampler(sampler, 4, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)


class Loader(TorchDataLoader[Any]):
    """A loader of the user's."""


SHARES: dict[str, Any] = {
    "sampler": lambda data, sampler: TorchDataLoader(data, batch_size=4, sampler=sampler),
    "batches": lambda data, sampler: TorchDataLoader(
        data, batch_sampler=BatchSampler(sampler, 4, False)
    ),
    "batches of its own": lambda data, sampler: TorchDataLoader(
        data, batch_sampler=InBatches(sampler)
    ),
    "batches in a loader": lambda data, sampler: Loader(
        data, batch_sampler=BatchSampler(sampler, 4, False)
    ),
    "built": lambda data, sampler: (
        source_over(data, sampler.rank, 2, batch_size=4, sampler=sampler).loader
    ),
}


@pytest.mark.parametrize("kind", SHARES)
def test_dividing_sampler_sees_one_permutation(kind: str) -> None:
    orders, first, data = [], [], torch.arange(LENGTH)[:, None]
    for rank in range(2):
        seed_streams(rank)
        source = source_of(SHARES[kind](data, EveryOther(rank)), rank=rank, world_size=2)
        first.append(source.described(next(source.batches())))
        source.rewind()
        orders += ids(drain(source))
    assert len(set(orders)) == len(orders) >= 2 * 8
    assert first[0] != first[1], "they read other data, though the dataset is the same"


def test_a_counted_loader_is_read_again_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    first = source_of([1, 2, 3])
    drain(first, 2)
    second = source_of([1, 2, 3], split="extra")
    with caplog.at_level(logging.WARNING, logger="danling"):
        second.load_state_dict(first.state_dict())
        assert drain(second) == [3]
        second.finish_pass()
        assert drain(second) == [1, 2, 3]
    (record,) = caplog.records
    assert "'extra' (list) cannot be positioned: its first 2 batches" in record.getMessage()
    shrunk = source_of([1])
    shrunk.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError, match=r"split 'train' to have at least 2 batches.*Received: 1 batches"
    ):
        drain(shrunk)


def test_counted_and_stateful_refuse_another_world_within_a_pass() -> None:
    first = source_of([1, 2, 3], world_size=2)
    drain(first, 2)
    with pytest.raises(ValueError, match=r"Expected 2 data ranks.*Received: 1"):
        source_of([1, 2, 3]).load_state_dict(first.state_dict())
    drain(first)
    first.finish_pass()
    source_of([1, 2, 3]).load_state_dict(first.state_dict())


def test_another_kind_of_loader_is_refused() -> None:
    state = source_of([1]).state_dict()
    with pytest.raises(
        ValueError, match=r"kind 'position' for split 'train'.*Received: kind='counted'"
    ):
        source_of(DataLoader(Augmented(3), Share())).load_state_dict(state)


def test_another_number_of_workers_of_a_stateful_loader_is_refused_by_name() -> None:
    first = source_of(stateful_loader(Stream(8), num_workers=2))
    drain(first, 1)
    state = first.state_dict()
    first.close()
    with pytest.raises(
        ValueError, match=r"Expected num_workers=2 .*split 'train'.*Received: num_workers=0"
    ):
        source_of(stateful_loader(Stream(8))).load_state_dict(state)


def test_going_on_in_the_same_process_reads_nothing_twice() -> None:
    for loader in (
        TorchDataLoader(Augmented(LENGTH), batch_size=4),
        stateful_loader(Augmented(LENGTH), batch_size=4),
    ):
        source = source_of(loader)
        taken = [drain(source, 2), drain(source, 1), drain(source)]
        assert ids([batch for part in taken for batch in part]) == list(range(LENGTH))
        assert loader.dataset.reads == list(range(LENGTH))


def test_unused_prefetched_batches_are_read_again_if_possible(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for loader, rest in (
        ([0, 1, 2, 3], [1, 2, 3]),
        (stateful_loader(Stream(4), batch_size=None), [2, 3]),
    ):
        source = source_of(loader)
        iterator = source.batches()
        source.commit([next(iterator)])
        next(iterator)
        assert drain(source) == rest
    assert "1 batches of split 'train' were read and not used" in caplog.text


def test_set_epoch_reaches_every_holder() -> None:
    class Told:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader(Told):
        def __init__(self) -> None:
            super().__init__()
            self.sampler = Told()
            self.batch_sampler = Told()
            self.batch_sampler.sampler = self.sampler  # type: ignore[attr-defined]
            self.dataset = Told()

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    loader = Loader()
    source = source_of(loader)
    for _ in range(2):
        drain(source)
        source.finish_pass()
    assert [
        holder.epochs for holder in (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    ] == [[0, 1]] * 4


def test_exhausted_iterator_is_refused() -> None:
    source = source_of(iter([1, 2, 3]))
    assert source.remaining_batches() is None and source.remaining_batches() is None
    assert drain(source, 2) + drain(source) == [1, 2, 3]
    assert source.remaining_batches() == 0
    source.finish_pass()
    with pytest.raises(ValueError, match=r"can be iterated again.*Received: list_iterator"):
        drain(source)


def test_failed_loader_is_not_taken_for_finished() -> None:
    class Flaky:
        broken = True

        def __iter__(self) -> Iterator[int]:
            yield 1
            if self.broken:
                raise OSError("disk")
            yield 2

    loader = Flaky()
    source = source_of(loader)
    with pytest.raises(OSError):
        drain(source)
    loader.broken = False
    assert drain(source) == [2]


def test_lengths_and_evenness() -> None:
    data = Augmented(LENGTH)
    assert source_of([1, 2]).remaining_batches() == 2
    assert source_of(stateful_loader(Stream(4))).remaining_batches() is None
    assert source_of([1], world_size=1).even and not source_of([1], world_size=2).even
    assert not source_of(TorchDataLoader(data), world_size=2).even
    with pytest.raises(
        ValueError, match=r"split 'train' to be iterable\. Received: loader=3 \(int\)"
    ):
        source_of(3)


class Bucketed(BatchSampler):
    """A batch sampler of the user's, whose batches may be of another number on each rank."""


@pytest.mark.parametrize("kind", ["built", TorchDataLoader, Loader])
def test_ranks_are_known_to_end_together_only_without_own_division(kind: Any) -> None:
    data = Augmented(LENGTH)
    divided = DistributedSampler(data, num_replicas=2, rank=1)
    for batches, even in (
        (BatchSampler(divided, 4, False), True),
        (Bucketed(divided, 4, False), False),
    ):
        own = (
            source_over(data, 1, 2, batch_sampler=batches)
            if kind == "built"
            else kind(data, batch_sampler=batches)
        )
        assert (own if kind == "built" else source_of(own, rank=1, world_size=2)).even == even


def test_batches_out_of_order_are_named(caplog: pytest.LogCaptureFixture) -> None:
    loader = TorchDataLoader(Augmented(4), num_workers=1, in_order=False)
    with caplog.at_level(logging.WARNING, logger="danling"):
        assert source_of(loader).kind == "counted"
    assert "split 'train' has in_order=False" in caplog.text


@pytest.mark.parametrize("read", [1, 3, 6])
def test_a_loaded_position_is_given_up_by_a_rewind(read: int) -> None:
    def make() -> BatchSource:
        sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
        return open_source(stateful_loader(list(range(12)), 2, sampler=sampler), split="train")

    def rest(source: BatchSource) -> list[list[int]]:
        return [batch.data.tolist() for batch in source.batches()]

    saved = make()
    begun = [batch.tolist() for batch in drain(saved, read)]
    state = saved.state_dict()
    whole = begun + rest(saved)
    loaded, again = make(), make()
    loaded.load_state_dict(state)
    loaded.rewind()
    assert rest(loaded) == whole
    again.load_state_dict(state)
    assert rest(again) == whole[read:]


class ItsOwnSampler:
    """A loader with the attributes of its kind in one object."""

    def __init__(self) -> None:
        self.numbers = TorchDataLoader(Augmented(LENGTH), batch_size=4)
        self.sampler = self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


class Delegating(ItsOwnSampler):
    """A loader that makes a new view of itself at each question."""

    def __init__(self) -> None:
        self.numbers = TorchDataLoader(Augmented(LENGTH), batch_size=4)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Delegating() if name == "sampler" else getattr(self.numbers, name)


class DelegatingSampler:
    """A sampler that answers for the one within it."""

    def __init__(self, sampler: Any) -> None:
        self.inner = sampler

    @property
    def sampler(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


ENDLESS: dict[str, Any] = {
    "itself": lambda rank: ItsOwnSampler(),
    "delegating": lambda rank: Delegating(),
    "in a sampler": lambda rank: TorchDataLoader(
        Augmented(LENGTH),
        batch_size=4,
        sampler=DelegatingSampler(DistributedSampler(range(LENGTH), num_replicas=2, rank=rank)),
    ),
}


class Means(TorchRunner):
    """Counts the samples that it trains on."""

    def __init__(self, directory: str, kind: str, rank_of_sampler: int | None) -> None:
        super().__init__({"dir": directory, "epochs": 1, "log": False, "seed": 1})
        self.model, self.count = nn.Linear(1, 1), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.dataloaders["train"] = ENDLESS[kind](
            self.rank if rank_of_sampler is None else rank_of_sampler
        )

    def train_step(self, data: Any) -> Any:
        loss = self.model(data[:, :1].float()).mean()
        self.backward(loss)
        self.count += len(data)
        return None, loss


def _train_with(kind: str, directory: str, rank_of_sampler: int | None = None) -> int:
    with Means(directory, kind, rank_of_sampler) as runner:
        runner.train()
        return runner.count


@pytest.mark.parametrize("kind", ENDLESS)
def test_sampler_with_a_cycle_is_read(tmp_path: Path, kind: str) -> None:
    found = run_processes(_train_with, kind, str(tmp_path), world_size=2, timeout=30)
    assert found == [LENGTH // 2 if kind == "in a sampler" else LENGTH] * 2


def test_share_of_a_sampler_with_a_cycle_is_checked(tmp_path: Path) -> None:
    found = run_outcomes(_train_with, "in a sampler", str(tmp_path), 0, world_size=2, timeout=30)
    errors = {one.rank: one.error for one in found}
    assert isinstance(errors[1], ValueError) and "to take share 1 of 2" in str(errors[1])
