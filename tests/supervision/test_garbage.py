"""Collections counted through Python's own callbacks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from danling.supervision import GcPacer


@pytest.fixture(autouse=True)
def automatic() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.fixture
def generations() -> Iterator[list[int]]:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_collects_at_the_interval_and_now_and_then_everything(generations: list[int]) -> None:
    pacer = GcPacer(5, generation=1)
    generations.clear()
    for _ in range(4):
        pacer.boundary_reached()
    assert generations == []
    for _ in range(96):
        pacer.boundary_reached()
    assert generations == ([1] * 9 + [2]) * 2


@pytest.mark.parametrize("before", [True, False])
def test_automatic_collection_is_off_inside_of_a_session_only(before: bool) -> None:
    if not before:
        gc.disable()
    pacer = GcPacer(10)
    assert gc.isenabled() is before
    for _ in range(2):
        pacer.training_started()
        assert not gc.isenabled()
        pacer.evaluation_started("val")
        pacer.evaluation_ended("val")
        assert not gc.isenabled()
        pacer.training_ended()
        assert gc.isenabled() is before
    GcPacer(10, disable_automatic=False).training_started()
    assert gc.isenabled() is before


def test_batches_are_counted_apart_from_updates(generations: list[int]) -> None:
    pacer = GcPacer(4, generation=0)
    pacer.boundary_reached()
    for number in range(9):
        pacer.evaluation_batch_started("val", number)
    assert generations == [0, 0]
    for _ in range(2):
        pacer.boundary_reached()
    assert generations == [0, 0]
    pacer.boundary_reached()
    assert generations == [0, 0, 0]
