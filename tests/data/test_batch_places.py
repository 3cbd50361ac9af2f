"""The place of a batch in its pass, which random numbers of the training are keyed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.datasets import Augmented, Stream, stateful_loader
from support.streams import publish
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler

from danling.data import BatchSource, DataLoader, Division, ReaderPlace, open_source
from danling.stream import MemoryChannel, MemoryStore, StreamLoader

LENGTH = 22
DATA = Augmented(LENGTH)


def windows(samples: int) -> StreamLoader:
    store, channel = MemoryStore(), MemoryChannel("log")
    publish(store, channel, range(samples))
    loader = StreamLoader(store, channel, 2)
    loader.take_place(ReaderPlace())
    return loader


def places(source: BatchSource) -> list[tuple[int, ...]]:
    return [batch.place for batch in source.batches()]


@pytest.mark.parametrize(
    ("settings", "world_size", "expected"),
    [
        ({"batch_size": 4}, 1, [[0, 4, 8, 12, 16, 20]]),
        ({"batch_size": 4}, 2, [[0, 8, 16], [4, 12, 19]]),
        ({"batch_size": None}, 2, [[*range(0, LENGTH, 2)], [*range(1, LENGTH, 2)]]),
        ({"division": Division.of_update(9, 2, micro_batch_size=3)}, 2, [[0, 3, 9, 12, 18], [5, 7, 14, 16, 20]]),
        ({"batch_size": 10, "pad": True}, 3, [[0], [8], [15]]),
        ({"batch_size": 7, "pad": True}, 3, [[0, 21], [7, 22], [14, 22]]),  # the last two are padding
    ],
)
def test_places_are_positions_in_the_order_of_the_pass(
    settings: dict[str, Any], world_size: int, expected: list[list[int]]
) -> None:
    for rank, starts in enumerate(expected):
        loader = DataLoader(DATA, shuffle=True, seed=1, rank=rank, world_size=world_size, **settings)
        assert places(open_source(loader, split="train")) == [(start,) for start in starts]
        assert places(open_source(loader, split="train", reads=False))[: len(starts)] == [(start,) for start in starts]


LOADERS: dict[str, Callable[[], Any]] = {
    "the library's": lambda: DataLoader(DATA, batch_size=2),
    "with a sampler": lambda: TorchDataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA)),
    "with a state": lambda: stateful_loader(Stream(LENGTH), batch_size=2),
    "counted": lambda: [1, 2, 3, 4, 5],
    "windows": lambda: windows(10),
}


@pytest.mark.parametrize("name", LOADERS)
def test_places_are_the_same_after_a_resume_and_on_ranks_that_read_nothing(name: str) -> None:
    def opened(*, reads: bool = True) -> BatchSource:
        return open_source(LOADERS[name](), split="train", seed=3, reads=reads)

    source = opened()
    taken = [batch.place for batch, _ in zip(source.batches(), range(5))]
    assert len(set(taken)) == 5
    assert taken == [(2 * n,) if name in ("the library's", "windows") else (0, n) for n in range(5)]
    source = opened()
    source.commit([batch for _, batch in zip(range(2), source.batches())])
    resumed, proxy = opened(), opened(reads=False)
    resumed.load_state_dict(source.state_dict())
    proxy.load_state_dict(source.state_dict())
    for other in (resumed, proxy):
        assert [batch.place for _, batch in zip(range(3), other.batches())] == taken[2:]
    for one in (source, resumed, proxy):
        one.close()
