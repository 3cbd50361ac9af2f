"""Every interleaving of the protocol ends where all living ranks run together, and no rule of it is superfluous."""

from __future__ import annotations

from typing import Any

import pytest

from danling.elastic.protocol import (
    NEW,
    CoordinatorSide,
    Message,
    RankSide,
    StateLost,
    StatesDiffer,
)

from .model import Explorer


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "generations": 2, "deaths": 1, "commits": 1},
        {"ranks": 2, "generations": 2, "births": 1},
        {"ranks": 3, "generations": 1, "deaths": 1},
        pytest.param(
            {"ranks": 2, "generations": 2, "deaths": 1, "forgets": False}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"ranks": 2, "generations": 2, "deaths": 1, "births": 1, "commits": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ranks": 2, "generations": 3, "deaths": 1, "commits": 1}, marks=pytest.mark.slow
        ),
        pytest.param({"ranks": 3, "generations": 2, "deaths": 1}, marks=pytest.mark.slow),
        pytest.param({"ranks": 3, "generations": 2, "births": 1}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(f"{name}{count}" for name, count in options.items()),
)
def test_every_state_has_a_way_to_run(options: dict[str, Any]) -> None:
    found = Explorer(**options).run()
    assert found.running
    assert found.stuck == found.unsafe == 0


def _ready(generation: int, progress: int, digest: str = "a", handle: str = "h") -> Message:
    return {
        "kind": "ready",
        "generation": generation,
        "progress": progress,
        "digest": digest,
        "handle": handle,
    }


def _formed(*progress: int, digests: str = "aaa") -> CoordinatorSide:
    side = CoordinatorSide(expected=len(progress))
    for member in range(len(progress)):
        side.join(member)
        side.hear(member, _ready(0, 0))
    assert side.advance()
    for member in range(len(progress)):
        side.hear(member, {"kind": "formed", "generation": 1})
    assert side.advance()
    for member, at in enumerate(progress):
        side.hear(member, _ready(1, at, digests[member]))
    return side


def test_rank_that_is_furthest_leads_and_others_are_behind() -> None:
    side = _formed(7, 8, 7)
    assert side.advance()
    assert side.order is not None
    assert (side.order["leader"], side.order["behind"]) == (1, [0, 2])


def test_two_states_of_one_update_are_refused() -> None:
    side = _formed(8, 8, digests="ab")
    with pytest.raises(StatesDiffer, match="after 8"):
        side.advance()


def test_form_of_an_earlier_attempt_is_not_followed() -> None:
    side = RankSide(handle="0.1")
    late = {"kind": "form", "generation": 1, "handles": ["0.0", "1.0"], "members": [0, 1]}
    assert side.hear(late) is None and side.mode == "ready"


def test_handle_of_an_earlier_generation_is_not_used() -> None:
    side = _formed(8, 8, digests="aa")
    assert side.advance() and side.generation == 2
    side.remove([0])
    # What the second rank said of generation 1 is known: it may be forming 2 now.
    assert not side.advance() and side.awaited == [1]


def test_late_message_does_not_replace_a_newer_one() -> None:
    side = _formed(8, 8, digests="aa")
    assert side.ready[0].generation == 1
    side.hear(0, _ready(0, 0))
    assert side.ready[0].generation == 1


def test_death_of_all_that_have_the_state_is_named() -> None:
    side = _formed(8, 8)
    side.join(5)
    side.hear(5, _ready(0, NEW))
    side.remove([0, 1])
    with pytest.raises(StateLost, match="newest checkpoint"):
        side.advance()


def test_member_that_was_left_behind_does_not_come_back() -> None:
    side = _formed(8, 8, 8)
    side.remove([2])
    assert side.advance()
    side.hear(2, _ready(1, 8))
    assert 2 not in side.roster


def test_fewer_ranks_than_needed_wait_until_the_time_is_over() -> None:
    side = _formed(8, 8)
    side.least = 2
    side.remove([1])
    assert not side.advance()
    side.accepts_fewer = True
    assert side.advance()
    assert side.order is not None and side.order["fewer"]
