"""Each rule that makes elastic ranks right is broken in turn: a test of this directory must fail then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danling.elastic.protocol import CoordinatorSide, Message, RankSide, Ready

from . import test_protocol
from .model import Explorer

# Rules of the protocol, broken in the model


class IgnoresLost(RankSide):
    """Waits for the form of its generation for ever."""

    def hear(self, message: Message) -> Message | None:
        seen = self.seen
        answer = super().hear(message)
        if message["kind"] == "lost" and self.mode == "ready":
            self.seen = seen
        return answer


class FormedIsSaidOnce(RankSide):
    """Says once that a generation is formed."""

    def hear(self, message: Message) -> Message | None:
        answer = super().hear(message)
        return None if message["kind"] == "form" else answer


class IgnoresRegroup(RankSide):
    """Trains on where others wait to be taken in."""

    @property
    def should_regroup(self) -> bool:
        return False


class FormedOfAnyGeneration(CoordinatorSide):
    """Counts an old answer for the generation that is being formed."""

    def hear(self, member: int, message: Message) -> None:
        if message["kind"] == "formed":
            message = {**message, "generation": self.generation}
        super().hear(member, message)


class FirstLeads(CoordinatorSide):
    """Has the first member lead, wherever it is."""

    def _begin_form(self, taking_part: list[int]) -> None:
        super()._begin_form(taking_part)
        assert self.order is not None
        self.order["leader"] = 0


_CATCHES = [
    (IgnoresLost, {"deaths": 1}),
    (FormedIsSaidOnce, {"births": 1}),
    (IgnoresRegroup, {"births": 1}),
    (FormedOfAnyGeneration, {"deaths": 1, "forgets": False}),
    (FirstLeads, {"births": 1, "commits": 1}),
]


@pytest.mark.parametrize(("side", "options"), _CATCHES)
def test_model_finds_a_broken_rule(side: type[Any], options: dict[str, Any]) -> None:
    options = {**options, "rank_side" if issubclass(side, RankSide) else "coordinator_side": side}
    found = Explorer(2, generations=2, **options).run()
    assert found.stuck or found.unsafe


# Rules that waste attempts, or lose a state, where they are broken


def _takes_any_form(self: RankSide, message: Message) -> Message | None:
    if message["kind"] == "form":
        self.mode, self.order, self.seen = "forming", message, int(message["generation"])
    return None


def _is_ready_for_any(self: CoordinatorSide, member: int, generation: int) -> bool:
    return member in self.ready


def _takes_the_last(self: CoordinatorSide, member: int, message: Message) -> None:
    if message["kind"] == "ready":
        self.ready[member] = Ready(
            *(message[name] for name in ("generation", "handle", "progress", "digest"))
        )
    else:
        self.formed[member] = message["generation"]


def _first_leads(self: CoordinatorSide, taking_part: list[int]) -> None:
    self.order = {"leader": 0, "behind": []}
    self.phase = "form"


@pytest.mark.parametrize(
    ("side", "name", "broken", "test"),
    [
        (
            RankSide,
            "hear",
            _takes_any_form,
            test_protocol.test_form_of_an_earlier_attempt_is_not_followed,
        ),
        (
            CoordinatorSide,
            "_is_ready",
            _is_ready_for_any,
            test_protocol.test_handle_of_an_earlier_generation_is_not_used,
        ),
        (
            CoordinatorSide,
            "hear",
            _takes_the_last,
            test_protocol.test_late_message_does_not_replace_a_newer_one,
        ),
        (
            CoordinatorSide,
            "_begin_form",
            _first_leads,
            test_protocol.test_rank_that_is_furthest_leads_and_others_are_behind,
        ),
        (
            CoordinatorSide,
            "_begin_form",
            _first_leads,
            test_protocol.test_two_states_of_one_update_are_refused,
        ),
    ],
)
def test_rule_that_is_broken_fails_its_test(
    side: type[Any],
    name: str,
    broken: Callable[..., Any],
    test: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test()
    monkeypatch.setattr(side, name, broken)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
