"""A loader that divides whole updates itself: what it is told, what is asked of it, and what a rank that reads nothing knows of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from danling.data import PLACEHOLDER, Batch, BatchSource, ReaderPlace, WindowLoader, open_source


class Numbers:
    """Two micro-batches an update, ten of them."""

    def __init__(self) -> None:
        self.epoch = self.consumed = 0
        self.place = ReaderPlace(split="unknown")
        self.committed: list[Mapping[str, Any]] = []
        self.freed = self.closed = 0

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def take_place(self, place: ReaderPlace) -> None:
        self.place = place

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        for number in range(self.consumed, 10):
            yield Batch(number if read else None, 1, 2, number % 2 == 1, (number * 2,))

    def advance(self, batches: int) -> None:
        self.consumed += batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.consumed = epoch, 0

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def commit_state(self, state: Mapping[str, Any]) -> None:
        self.committed.append(state)

    def free(self) -> None:
        self.freed += 1

    def metrics(self) -> dict[str, float]:
        return {"left": 10 - self.consumed}

    def standing(self) -> Mapping[str, object]:
        return {"stream": "numbers", "trained": self.consumed}

    def close(self) -> None:
        self.closed += 1


def opened(**place: Any) -> tuple[Numbers, BatchSource]:
    """Return a loader and the source over it."""
    loader = Numbers()
    assert isinstance(loader, WindowLoader)
    return loader, open_source(loader, split="train", seed=3, place=ReaderPlace(**place))


def test_the_loader_hears_its_place_and_keeps_the_position() -> None:
    loader, source = opened(rank=1, world_size=2, accum_steps=2)
    assert (loader.place.rank, loader.place.world_size) == (1, 2)
    assert (source.kind, source.is_rank_local, source.even, source.foreseen) == ("window", False, True, True)
    assert (source.num_batches, source.remaining_batches()) == (None, None)
    batches = source.batches()
    first = [next(batches), next(batches)]
    assert source.consumed == 0
    source.commit(first)
    assert (source.consumed, source.metrics()) == (2, {"left": 8})
    assert source.state_dict() == {"kind": "window", "epoch": 0, "consumed": 2}
    source.finish_pass()
    assert (source.epoch, source.consumed) == (1, 0)
    source.close()
    assert loader.closed == 1


def test_what_is_on_the_disk_goes_to_the_loader_and_to_no_other_kind() -> None:
    loader, source = opened()
    source.commit_state({"kind": "position", "consumed": 9})
    source.commit_state({"kind": "window", "consumed": 4, "epoch": 0})
    source.free()
    assert (loader.committed, loader.freed) == ([{"consumed": 4, "epoch": 0}], 1)
    plain = open_source([1, 2], split="train")
    plain.commit_state({"kind": "counted"})
    plain.free()
    assert plain.metrics() == {}


def test_a_rank_that_reads_nothing_knows_every_batch() -> None:
    loader, source = opened()
    proxy = open_source(loader, split="train", seed=3, reads=False)
    assert proxy.even and proxy.foreseen
    seen = list(proxy.batches())
    assert [batch[1:] for batch in seen] == [batch[1:] for batch in source.batches()]
    assert {batch.data for batch in seen} == {PLACEHOLDER}
    proxy.load_state_dict({"kind": "window", "epoch": 2, "consumed": 6})
    assert (loader.epoch, loader.consumed) == (2, 6)


def test_a_position_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'window'.*Received: kind='position'"):
        opened()[1].load_state_dict({"kind": "position"})
