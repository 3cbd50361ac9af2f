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
SLOW = [1.0, 9.0, 0.0, 0.0, 0.0]


def collected(share: float = 0.1, hosts: str = "aabb", taken: Any = None, **more: Any) -> RankTimes:
    watch: Any = SimpleNamespace(take=taken, hosts=[(host, 1) for host in hosts])
    return RankTimes(watch, share, **more)


def rows(*times: Sequence[float], looks: float = 200.0) -> list[list[float]]:
    return [[*row, looks] for row in times]


@pytest.mark.parametrize("cause", ["data", "computing", "checkpointing", "evaluating"])
def test_rank_with_the_least_waiting_costs_the_difference(cause: str) -> None:
    slow = [1.0, 6.0, 0.0, 0.0, 0.0]
    slow[ACTIVITIES.index(cause)] += 3.0
    lost = lost_times([EVEN, EVEN, slow, EVEN])
    assert [round(seconds, 9) for seconds, _ in lost] == [0, 0, 3, 0] and lost[2][1] == cause
    words = "waiting for data" if cause == "data" else cause
    assert collected().judge(rows(EVEN, EVEN, slow, EVEN)) == f"rank 2 on b costs 30% ({words})"


def test_activity_finished_before_the_others_costs_nothing() -> None:
    # The second rank reads long, and has less to compute: the others never wait for it.
    lost = lost_times([[0.0, 9.0, 1.0, 0.0, 0.0], [6.0, 2.0, 2.0, 0.0, 0.0]])
    assert lost[1][0] == 0 and lost[0][0] == 1.0
    assert lost_times([EVEN])[0][0] == 0 and lost_times([]) == []
    assert [seconds for seconds, _ in lost_times([SLOW, EVEN, EVEN, SLOW])] == [3.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_even_ranks_raise_no_alarm_however_few_looks_their_times_come_from(ranks: int) -> None:
    dice = random.Random(ranks)
    for looks in (5, 20, 40, 200):
        times = collected(hosts="a" * ranks)
        for _ in range(4000 // ranks):
            # Busy at each look with the same chance, on every rank.
            busy = [sum(dice.random() < 0.5 for _ in range(looks)) for _ in range(ranks)]
            assert not times.judge(
                [[0.0, 0.05 * n, 0.05 * (looks - n), 0.0, 0.0, float(looks)] for n in busy]
            )


def test_small_differences_add_up_until_they_are_significant() -> None:
    times, few = (
        collected(),
        rows(*[[0.1, 0.6, 0.3, 0.0, 0.0]] * 3, [0.1, 0.9, 0.0, 0.0, 0.0], looks=10.0),
    )
    named = [times.judge(few) for _ in range(20)]
    assert named[0] == "" and any(found.startswith("rank 3 on b") for found in named)
    # Less than the share is nobody, whatever the number of looks.
    assert not any(collected(0.5).judge(rows(EVEN, EVEN, SLOW, looks=1e6)) for _ in range(3))


def test_times_of_a_rank_add_up_to_the_elapsed_time() -> None:
    now, seen = [0.0], [([2.0, 3.0, 1.0, 0.0, 0.0], 40), ([0.0] * 5, 0)]
    times = collected(taken=lambda: seen.pop(0), clock=lambda: now[0])
    now[0] = 10.0
    # Waiting for data is measured; what looks have seen divides the rest.
    assert times.own(2.0) == [2.0, 6.0, 2.0, 0.0, 0.0, 40.0]
    now[0] = 14.0
    assert times.own(1.0) == [1.0, 3.0, 0.0, 0.0, 0.0, 0.0]


def test_table_has_the_machine_of_each_attempt_and_skips_lines_without_times() -> None:
    times = collected(hosts="ab")
    older: dict[str, object] = {
        name: [EVEN[index], SLOW[index]] for index, name in enumerate(ACTIVITIES)
    }
    lines: list[dict[str, object]] = [{"step": 1, "train/loss": 0.5}, {"step": 2, "ranks": older}]
    lines += [{"step": step, "ranks": times.record(rows(EVEN, SLOW))} for step in (3, 4)]
    assert ["hosts" in str(line) for line in lines] == [False, False, True, False]
    lines += [{"step": 5, "ranks": 3}, {"step": 6, "ranks": {"data": [1.0]}}]
    table = rank_table(lines)
    assert [(row.rank, row.host, round(row.lost, 6)) for row in table] == [
        (1, "b", 6.0),
        (1, None, 3.0),
        (0, None, 0.0),
        (0, "a", 0.0),
    ]
    assert (
        table[0].cause == "computing"
        and table[0].seconds["computing"] == 18.0
        and table[-1].cause is None
    )
    assert rank_table([*lines[:1], {"ranks": {name: [] for name in ACTIVITIES}}]) == []


def test_ranks_slow_by_turns_are_all_named() -> None:
    halves = [[EVEN, SLOW], [SLOW, EVEN]]
    lines = [
        {"ranks": {n: [row[i] for row in half] for i, n in enumerate(ACTIVITIES)}}
        for half in halves
        for _ in "12"
    ]
    assert [(row.rank, row.lost, row.cause) for row in rank_table(lines)] == [
        (0, 6.0, "computing"),
        (1, 6.0, "computing"),
    ]
    lines[0]["ranks"]["data"] = [10**400, 0.0]
    assert [row.lost for row in rank_table(lines)] == [3.0, 0.0]
