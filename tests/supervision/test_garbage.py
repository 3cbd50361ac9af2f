"""Collections counted through Python's own callbacks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from danling.supervision import GcPacer


class Node:
    """An object that can refer to itself."""

    me: Any = None


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
        pacer.step()
    assert generations == []
    for _ in range(96):
        pacer.step()
    assert generations == ([1] * 9 + [2]) * 2
    pacer.close()


def test_an_old_cycle_is_freed_while_automatic_collection_is_off() -> None:
    pacer = GcPacer(1, generation=0)
    node = Node()
    node.me = node
    gone = weakref.ref(node)
    gc.collect(0)
    gc.collect(1)
    del node
    for _ in range(10):
        pacer.step()
    assert gone() is None
    pacer.close()


@pytest.mark.parametrize("before", [True, False])
def test_automatic_collection_is_put_back_as_it_was(before: bool) -> None:
    if not before:
        gc.disable()
    pacer = GcPacer(10)
    assert not gc.isenabled()
    pacer.close()
    pacer.close()
    assert gc.isenabled() is before


def test_automatic_collection_can_stay() -> None:
    pacer = GcPacer(10, disable_automatic=False)
    assert gc.isenabled()
    pacer.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"interval": 0}, "Expected gc.interval >= 1"), ({"interval": 1, "generation": 3}, "Expected gc.generation")],
)
def test_bad_values_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GcPacer(**settings)
    assert gc.isenabled()
