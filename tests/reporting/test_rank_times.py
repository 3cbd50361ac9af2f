"""Times of ranks by themselves: which rank costs the others what, when one is named, and what a table makes of a file of metrics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from danling.reporting.rank_times import ACTIVITIES, RankTimes, lost_times, rank_table

EVEN = [1.0, 6.0, 3.0, 0.0, 0.0]
"""Ten seconds of a rank: data, computing, waiting, checkpointing, evaluating."""


def collected(share: float = 0.1, hosts: Sequence[str | None] = ("a", "a", "b", "b"), **more: Any) -> RankTimes:
    watch: Any = SimpleNamespace(take=lambda: ([0.0] * 5, 0), hosts=lambda: hosts)
    return RankTimes(watch, share, **more)


def rows(*times: Sequence[float], looks: float = 200.0) -> list[list[float]]:
    return [[*row, looks] for row in times]


@pytest.mark.parametrize("cause", ["data", "computing", "checkpointing", "evaluating"])
def test_who_waits_least_costs_the_difference(cause: str) -> None:
    slow = [1.0, 6.0, 0.0, 0.0, 0.0]
    slow[ACTIVITIES.index(cause)] += 3.0
    lost = lost_times([EVEN, EVEN, slow, EVEN])
    assert [round(rank.seconds, 9) for rank in lost] == [0, 0, 3, 0] and lost[2].cause == cause
    named = collected().judge(rows(EVEN, EVEN, slow, EVEN))
    assert named is not None and (named.rank, named.host, round(named.share, 9), named.cause) == (2, "b", 0.3, cause)
    words = "waiting for data" if cause == "data" else cause
    assert str(named) == f"rank 2 on b costs 30% ({words})"


def test_time_in_an_activity_costs_nothing_where_a_rank_is_done_with_it_before_the_others() -> None:
    # The second rank reads long, and has less to compute: the others never wait for it.
    ranks = [[0.0, 9.0, 1.0, 0.0, 0.0], [6.0, 2.0, 2.0, 0.0, 0.0]]
    assert lost_times(ranks)[1].seconds == 0 and lost_times(ranks)[0].seconds == 1.0
    assert lost_times([EVEN])[0].seconds == 0 and lost_times([]) == []
    slow = [1.0, 9.0, 0.0, 0.0, 0.0]
    assert [rank.seconds for rank in lost_times([slow, EVEN, EVEN, slow])] == [3.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_even_ranks_raise_no_alarm_however_few_looks_their_times_come_from(ranks: int) -> None:
    dice = random.Random(ranks)
    for looks in (5, 20, 40, 200):
        times = collected(hosts=["a"] * ranks)
        for _ in range(4000 // ranks):
            # Busy at each look with the same chance, on every rank.
            busy = [sum(dice.random() < 0.5 for _ in range(looks)) for _ in range(ranks)]
            seen = [[0.0, 0.05 * number, 0.05 * (looks - number), 0.0, 0.0, float(looks)] for number in busy]
            assert times.judge(seen) is None


def test_what_is_too_little_to_tell_adds_up_until_it_is_enough() -> None:
    times, slow = collected(), [0.1, 0.9, 0.0, 0.0, 0.0]
    few = rows(*[[0.1, 0.6, 0.3, 0.0, 0.0]] * 3, slow, looks=10.0)
    named = [times.judge(few) for _ in range(20)]
    assert named[0] is None and any(found is not None and found.rank == 3 for found in named)
    # Less than the share is nobody, whatever the number of looks.
    assert all(collected(0.5).judge(rows(EVEN, EVEN, [1, 9, 0, 0, 0], looks=1e6)) is None for _ in range(3))


def test_the_times_of_a_rank_add_up_to_the_time_that_went_by() -> None:
    now = [0.0]
    seen: list[tuple[list[float], int]] = [([2.0, 3.0, 1.0, 0.0, 0.0], 40), ([0.0] * 5, 0)]
    watch: Any = SimpleNamespace(take=lambda: seen.pop(0), hosts=lambda: ())
    times = RankTimes(watch, 0.1, clock=lambda: now[0])
    now[0] = 10.0
    # Waiting for data is measured; what looks have seen divides the rest.
    assert times.own(2.0) == [2.0, 6.0, 2.0, 0.0, 0.0, 40.0]
    now[0] = 14.0
    assert times.own(1.0) == [1.0, 3.0, 0.0, 0.0, 0.0, 0.0]


def test_a_table_knows_the_machine_of_each_attempt_and_passes_over_older_lines() -> None:
    hosts: list[str | None] = [None, None]
    times = collected(hosts=hosts)
    slow = [1.0, 9.0, 0.0, 0.0, 0.0]
    first = {"step": 1, "train/loss": 0.5}
    lines: list[dict[str, object]] = [first, {"step": 2, "ranks": times.record(rows(EVEN, slow))}]
    hosts[:] = ["a", "b"]
    lines += [{"step": step, "ranks": times.record(rows(EVEN, slow))} for step in (3, 4)]
    assert [set(line.get("ranks", ())) - set(ACTIVITIES) for line in lines] == [set(), {"hosts"}, {"hosts"}, set()]  # type: ignore[call-overload]
    lines += [{"step": 5, "ranks": 3}, {"step": 6, "ranks": {"data": [1.0]}}]
    table = rank_table(lines)
    assert [(row.rank, row.host, round(row.lost, 6)) for row in table] == [
        (1, "b", 6.0),
        (1, None, 3.0),
        (0, None, 0.0),
        (0, "a", 0.0),
    ]
    assert table[0].cause == "computing" and table[0].seconds["computing"] == 18.0 and table[-1].cause is None
    assert rank_table([first]) == []
