"""Every interleaving of the protocol ends where all living ranks run together, and no rule of it is superfluous."""

from __future__ import annotations

from typing import Any

import pytest

from danling.elastic.protocol import NEW, CoordinatorSide, Message, RankSide, StateLost, StatesDiffer

from .model import Explorer


class WithoutLost(RankSide):
    """Waits for the form of its generation for ever."""

    def hear(self, message: Message) -> Message | None:
        seen = self.seen
        answer = super().hear(message)
        if message["kind"] == "lost" and self.mode == "ready":
            self.seen = seen
        return answer


class WithoutRepeat(RankSide):
    """Says once that a generation is formed."""

    def hear(self, message: Message) -> Message | None:
        answer = super().hear(message)
        return None if message["kind"] == "form" else answer


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "generations": 2, "deaths": 1},
        pytest.param({"ranks": 2, "generations": 2, "births": 1}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "generations": 3}, marks=pytest.mark.slow),
        pytest.param({"ranks": 3, "generations": 1, "deaths": 1}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(f"{name}{count}" for name, count in options.items()),
)
def test_every_state_has_a_way_to_run(options: dict[str, Any]) -> None:
    found = Explorer(**options).run()
    assert found.running
    assert found.stuck == 0


@pytest.mark.parametrize("side", [WithoutLost, WithoutRepeat])
def test_missing_rule_leaves_ranks_waiting(side: type[RankSide]) -> None:
    assert Explorer(2, generations=2, rank_side=side).run().stuck > 0


def _ready(generation: int, progress: int, digest: str = "a", handle: str = "h") -> Message:
    return {"kind": "ready", "generation": generation, "progress": progress, "digest": digest, "handle": handle}


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
