"""The search for planted faults: which programs a fault gets, and what counts as found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explore.planted_search import FAULTS, Search, checked_with, checked_without
from explore.properties import Verdict
from explore.spec import Data, Event, Model, Optimizer, Part, Program, Settings, Stack, State

COUNTS_BYTES = Program(
    data=Data(train=8),
    settings=Settings(
        batch_size=2, epochs=None, steps=3, checkpoint_interval=1, async_mode="disabled"
    ),
    state=(State("runner", "bytes"),),
    events=(Event("kill", 1),),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_switch_is_reached_by_a_program_that_it_would_change(ranks: int) -> None:
    program = replace(COUNTS_BYTES, stack=Stack("ddp", ranks=ranks))
    verdict, reached = checked_without(program)
    assert verdict.kind == "right", verdict
    assert "bytes_are_not_saved" in reached
    assert "one_number_for_all_streams" in reached, "every program reaches it"
    assert not {
        "enumerations_are_not_saved",
        "buffers_are_averaged",
        "larger_budget_keeps_the_curve",
    } & set(reached)


def test_fault_is_found_by_a_program_that_fails_with_it_and_not_without() -> None:
    verdict = checked_with("bytes_are_not_saved", COUNTS_BYTES)
    assert (verdict.kind, verdict.broken) == ("differs", "resumed_is_the_same"), verdict
    assert checked_with("buffers_are_averaged", COUNTS_BYTES).kind == "right"


LEFT_OUT = Model((Part("sometimes", flag=True, parts=(Part("linear"),)),))
SHOWS = {
    "own_entries_of_optimizer_are_dropped": Program(
        data=Data(train=8),
        optimizer=Optimizer("lookahead", by_config=False, lenient=True),
        settings=Settings(batch_size=2, epochs=None, steps=4),
        events=(Event("stop", 2),),
    ),
    "gradient_of_hsdp_comes_late": Program(
        model=LEFT_OUT,
        data=Data(train=16),
        settings=Settings(batch_size=2, accum_steps=2),
        stack=Stack("parallel", ranks=4, replicate=2, shard=2),
    ),
    "changed_attribute_is_not_named": Program(
        settings=Settings(
            batch_size=None, global_batch_size=4, micro_batch_size=1, gradient_sum="canonical"
        ),
        state=(State("runner", "int"),),
    ),
    "blocks_are_mixed_up": Program(
        model=Model(tasks=True),
        settings=Settings(batch_size=2),
        stack=Stack("parallel", ranks=2, shard=2),
    ),
}
"""Programs that the strategies can draw since, by the faults that the last table of the docs says were not found."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", SHOWS)
def test_fault_that_was_not_found_is_shown_by_a_program_that_can_be_drawn(fault: str) -> None:
    without, reached = checked_without(SHOWS[fault])
    assert without.kind in ("right", "named", "refused"), without
    assert fault in reached
    assert checked_with(fault, SHOWS[fault]).kind == "differs"


def test_fault_is_checked_with_the_programs_that_reach_it_alone() -> None:
    search = Search(
        1, ["bytes_are_not_saved", "enumerations_are_not_saved", "buffers_are_averaged"]
    )
    reach = [["bytes_are_not_saved"], ["bytes_are_not_saved", "enumerations_are_not_saved"], []]
    for reached in reach:
        search.programs.append(COUNTS_BYTES)
        # A program that is refused shows a fault that takes the refusal away.
        search.take("", len(search.programs) - 1, Verdict("refused"), reached)
    served = []
    for _ in range(6):
        fault, number = search.next_task()
        if fault:
            served.append((fault, number))
            search.take(fault, number, Verdict("right"), [])
    assert served == [
        ("bytes_are_not_saved", 0),
        ("enumerations_are_not_saved", 1),
        ("bytes_are_not_saved", 1),
    ]
    assert len(search.programs) == 6, "every second check is of a new program"


def test_fault_that_was_found_is_checked_no_more_and_has_its_figures_in_the_table() -> None:
    search = Search(1, ["bytes_are_not_saved"])
    for number in range(2):
        search.programs.append(COUNTS_BYTES)
        search.take("", number, Verdict("right"), ["bytes_are_not_saved"])
    assert search.next_task() == ("bytes_are_not_saved", 0)
    search.take(
        "bytes_are_not_saved", 0, Verdict("differs", "count: 1 and 2", "resumed_is_the_same"), []
    )
    assert {search.next_task()[0] for _ in range(3)} == {""}
    point = FAULTS["bytes_are_not_saved"].point
    assert f"| bytes_are_not_saved | {point} | 1 | 1 | resumed_is_the_same |" in search.report(1.0)
    assert "1 of 1 found" in search.report(1.0)


def test_program_that_fails_without_a_fault_shows_none() -> None:
    search = Search(1, ["bytes_are_not_saved"])
    search.programs.append(COUNTS_BYTES)
    search.take("", 0, Verdict("differs", "off", "reference"), ["bytes_are_not_saved"])
    assert not search.waiting["bytes_are_not_saved"]
