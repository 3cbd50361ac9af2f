"""Loaders without a state that hold counters: their own are put back where a pass is read again, those of others are left alone."""

from __future__ import annotations

from collections.abc import Iterator

from danling.data.live_cursors import CountedCursor
from danling.data.sampler_state import SamplerState
from danling.runners.state import TrainState


class Stage:
    def __init__(self) -> None:
        self.epoch = -1


class Loader:
    """Counts its passes in a part, and knows how far the run is."""

    def __init__(self) -> None:
        self.stage, self.train = Stage(), TrainState()

    def __iter__(self) -> Iterator[int]:
        self.stage.epoch += 1
        yield from range(10 * self.stage.epoch, 10 * self.stage.epoch + 4)


def cursor_of(loader: Loader) -> CountedCursor:
    return CountedCursor(loader, split="val", rank=0, world_size=1, seed=1)


def read(cursor: CountedCursor) -> list[object]:
    return [batch.data for batch in cursor.batches()]


def test_a_counter_goes_on_between_evaluations_and_that_of_the_run_is_never_set() -> None:
    loader = Loader()
    cursor, seen = cursor_of(loader), []
    for epoch in (1, 2, 3):
        loader.train.epoch = epoch
        cursor.set_epoch(0)
        seen.append(read(cursor)[0])
        assert loader.train.epoch == epoch
    assert seen == [0, 10, 20]


def test_a_pass_that_goes_on_is_read_with_its_own_counter() -> None:
    loader = Loader()
    cursor = cursor_of(loader)
    read(cursor)
    cursor.set_epoch(1)
    batches = cursor.batches()
    next(batches)
    cursor.commit(1)
    state = cursor.state_dict()
    again = Loader()
    again.train.epoch = 7
    resumed = cursor_of(again)
    resumed.load_state_dict(state)
    assert read(resumed) == [11, 12, 13] and again.train.epoch == 7


def test_the_state_of_a_sampler_leaves_the_counters_of_the_run() -> None:
    loader = Loader()
    sampler = SamplerState(loader, None)
    loader.stage.epoch, loader.train.epoch = 3, 3
    state = sampler.capture()
    loader.stage.epoch = loader.train.epoch = 5
    sampler.restore(state)
    assert (loader.stage.epoch, loader.train.epoch) == (3, 5)
