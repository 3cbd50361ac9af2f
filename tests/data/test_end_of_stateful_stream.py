"""A pass over a dataset that keeps its own place, saved where all was read and its end was not seen yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.datasets import stateful_loader
from torch.utils.data import IterableDataset

from danling.data import BatchSource, open_source

LENGTH = 6


class Place(IterableDataset[int]):
    """Draws an order where nothing is left of the last one, as such datasets are commonly written."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.order: list[int] = []
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        if not self.order:
            self.order = torch.randperm(LENGTH).tolist()
        while self.order:
            if len(self.order) == self.fails_at:
                raise OSError("a shard cannot be read")
            yield self.order.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}  # the list itself, which goes on changing

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class OwnLoader(Place):
    """A loader of the user's own that is positioned in the same way."""

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([index]) for index in super().__iter__())


def source(way: str, **options: Any) -> BatchSource:
    workers = 1 if way == "worker" else 0
    loader = (
        OwnLoader(**options)
        if way == "own"
        else stateful_loader(Place(**options), 1, num_workers=workers)
    )
    return open_source(loader, split="train", seed=3)


def read(source: BatchSource, batches: int = 100, *, saves: bool = False) -> list[int]:
    """Read and consume so many batches at most, over passes up to the second one."""
    seen: list[int] = []
    while source.epoch < 2:
        for batch in source.batches():
            seen.append(int(batch.data))
            source.commit([batch])
            if saves:
                source.state_dict()
            if len(seen) == batches:
                return seen
        source.finish_pass()
    return seen


@pytest.mark.parametrize(
    ("way", "stop"),
    [
        *((way, stop) for way in ("loader", "own") for stop in (1, LENGTH, LENGTH + 2, 2 * LENGTH)),
        ("worker", LENGTH),
    ],
)
def test_it_goes_on_with_the_next_pass(way: str, stop: int) -> None:
    whole = read(source(way))
    assert len(whole) == 2 * LENGTH and sorted(whole[:LENGTH]) == list(range(LENGTH))
    stopped = source(way)
    first, state = read(stopped, stop), stopped.state_dict()
    assert stopped.state_dict() == state, "asked twice, it is the same position"
    resumed = source(way)
    resumed.load_state_dict(state)
    assert first + read(resumed) == whole
    assert first + read(stopped) == whole, "the run that was saved goes on too"
    for each in (stopped, resumed):
        each.close()


@pytest.mark.parametrize("way", ["loader", "own"])
def test_saving_after_every_batch_changes_nothing(way: str) -> None:
    assert read(source(way), saves=True) == read(source(way))


@pytest.mark.parametrize("way", ["loader", "own"])
def test_unreadable_batch_fails_at_its_request(way: str) -> None:
    failing = source(way, fails_at=2)
    first = read(failing, LENGTH - 2)
    state = failing.state_dict()
    with pytest.raises(OSError, match="a shard cannot be read"):
        read(failing)
    mended = source(way)
    mended.load_state_dict(state)
    assert first + read(mended) == read(source(way))
