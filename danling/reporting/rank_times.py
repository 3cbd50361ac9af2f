"""What the ranks of a run spend their time with, and which of them holds the others up.

A rank that is slow does not wait, and the others wait for it. So what a rank costs is the time that it was busy longer than the others
were: that is what an update would take less if it were as fast as they are.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danling.supervision.rank_watch import RankWatch

ACTIVITIES = ("data", "computing", "waiting", "checkpointing", "evaluating")
"""What a rank does, in the order of its times; `waiting` is for the other ranks."""

_WAITING = ACTIVITIES.index("waiting")
_JUDGED_SECONDS = 60.0
"""Seconds after which samples that named no rank are forgotten."""
_CERTAIN = 3.0
"""Standard deviations by which a rank must differ beyond what the largest of so many even ones does."""
_FEWEST_SAMPLES = 20
_STRETCH_SECONDS = 10.0
"""Over how much time at least a table adds up what each rank cost: of times that were sampled one is always the largest."""


def lost_times(times: Sequence[Sequence[float]]) -> list[tuple[float, str]]:
    """Return for each rank how many seconds longer than the median of the others it was busy, and the activity in which it differs most."""
    if len(times) < 2:
        return [(0.0, "computing") for _ in times]
    busy = [sum(row[: len(ACTIVITIES)]) - row[_WAITING] for row in times]
    usual = _middles_of_others(busy)
    middles = {
        index: _middles_of_others([row[index] for row in times])
        for index in range(len(ACTIVITIES))
        if index != _WAITING
    }
    found = []
    for rank, row in enumerate(times):
        more = {index: row[index] - values[rank] for index, values in middles.items()}
        found.append(
            (
                max(busy[rank] - usual[rank], 0.0),
                ACTIVITIES[max(more, key=lambda index: more[index])],
            )
        )
    return found


def _middles_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the middle one of the others, the lower of two."""
    # Without the value itself, the middle of those that are left moves up by one for the lower half.
    order = sorted(range(len(values)), key=lambda index: values[index])
    middle = (len(values) - 2) // 2
    upper = set(order[middle + 1 :])
    return [values[order[middle if index in upper else middle + 1]] for index in range(len(values))]


class RankTimes:
    """Collects what the ranks spend their time with, from one log line to the next, and judges it."""

    def __init__(
        self, watch: RankWatch, share: float, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._watch = watch
        self._share = share
        self._clock = clock
        self._opened = clock()
        self._pending: list[list[float]] = []
        self._has_logged_hosts = False

    def own(self, waited_for_data: float) -> list[float]:
        """Return the times of this rank since the last call, and the number of looks they come from, as the collective carries them."""
        now = self._clock()
        elapsed, self._opened = now - self._opened, now
        seen, looks = self._watch.take()
        data = min(waited_for_data, elapsed)
        # What was seen divides the rest; without a look it counts as computing.
        others = seen[1:] if any(seen[1:]) else [1.0, *[0.0] * (len(ACTIVITIES) - 2)]
        return [data, *((elapsed - data) * value / sum(others) for value in others), float(looks)]

    def judge(self, rows: Sequence[Sequence[float]]) -> str:
        """Return which rank holds the others up, if it costs more than the share, with these rows and those before them; else "".

        Sampled times are uncertain: rows that are too few to tell are kept, and later ones add to them.
        """
        # Empty after a judgement: then these rows are the first ones.
        pending = [list(row) for row in rows]
        if len(self._pending) == len(rows):
            pending = [[old + new for old, new in zip(*pair)] for pair in zip(self._pending, rows)]
        self._pending = pending
        if len(pending) < 2 or min(row[-1] for row in pending) < _FEWEST_SAMPLES:
            return ""
        lost, cause, rank = max((*cost, rank) for rank, cost in enumerate(lost_times(pending)))
        seconds = sum(pending[rank][:-1])
        is_slow = lost > max(self._share * seconds, _uncertainty(pending))
        # Named, or long enough to say that none is: later times are judged by themselves.
        if is_slow or seconds > _JUDGED_SECONDS:
            self._pending = []
        host = self._watch.hosts[rank][0]
        words = "waiting for data" if cause == "data" else cause
        return (
            f"rank {rank} on {host} costs {100 * lost / seconds:.0f}% ({words})" if is_slow else ""
        )

    def record(self, rows: Sequence[Sequence[float]]) -> dict[str, object]:
        """Return what `metrics.jsonl` has of them: seconds by rank for each activity, and in the first line of a training the hosts."""
        record: dict[str, object] = {
            n: [round(row[index], 4) for row in rows] for index, n in enumerate(ACTIVITIES)
        }
        if not self._has_logged_hosts:
            self._has_logged_hosts = True
            record["hosts"] = [host for host, _ in self._watch.hosts]
        return record


def _uncertainty(rows: Sequence[Sequence[float]]) -> float:
    """Return by how many seconds the busiest of even ranks may seem to differ, since their times come from so many looks."""
    variances = []
    for row in rows:
        total = sum(row[:-1])
        busy = 1 - row[_WAITING] / total if total else 0.0
        # A share that comes from n looks has the variance p(1 - p) / n; two of them are compared.
        variances.append(2 * busy * (1 - busy) / max(row[-1], 1.0))
    # The largest of n normal numbers is about sqrt(2 ln n).
    deviations = _CERTAIN + math.sqrt(2 * math.log(len(rows)))
    return max(sum(row[:-1]) for row in rows) * math.sqrt(max(variances)) * deviations


@dataclass(frozen=True)
class RankRow:
    """One row of a table of ranks: seconds that the rank cost the others, their share of the time of training, where most of them went
    (`None` where it cost nothing), and its times by activity."""

    rank: int
    host: str | None
    lost: float
    share: float
    cause: str | None
    seconds: Mapping[str, float]


def rank_table(records: Sequence[Mapping[str, object]]) -> list[RankRow]:
    """Return what each rank of a run cost, the one that cost most first; a rank that went on on another machine has a row for each."""
    totals: dict[tuple[int, str | None], list[float]] = {}
    lost: defaultdict[tuple[int, str | None], defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    training = 0.0
    for times, hosts in _stretches(records):
        training += max(map(sum, times))
        for rank, (row, (seconds, cause)) in enumerate(zip(times, lost_times(times))):
            key = rank, hosts[rank] if rank < len(hosts) else None
            totals[key] = [a + b for a, b in zip(totals.get(key, [0.0] * len(row)), row)]
            lost[key][cause] += seconds
    rows = []
    for (rank, host), row in totals.items():
        causes = lost[rank, host]
        cost = sum(causes.values())
        most = max(causes, key=lambda name: causes[name]) if cost else None
        rows.append(
            RankRow(rank, host, cost, cost / (training or 1.0), most, dict(zip(ACTIVITIES, row)))
        )
    return sorted(rows, key=lambda row: (-row.lost, row.rank))


def _stretches(
    records: Sequence[Mapping[str, object]],
) -> list[tuple[list[list[float]], list[str | None]]]:
    """Return the times of ranks, and their machines, summed over so many lines that what looks have missed evens out.

    The first line of an attempt names the machines; lines without times are left out.
    """
    stretches: list[tuple[list[list[float]], list[str | None]]] = []
    times: list[list[float]] = []
    hosts: list[str | None] = []
    for record in records:
        ranks: Any = record.get("ranks")
        try:
            rows = [
                list(map(float, row))
                for row in zip(*(ranks[name] for name in ACTIVITIES), strict=True)
            ]
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if not rows:
            continue
        listed = ranks.get("hosts")
        if isinstance(listed, list):
            hosts = [host if isinstance(host, str) else None for host in listed]
        if (
            isinstance(listed, list)
            or len(times) != len(rows)
            or max(map(sum, times)) > _STRETCH_SECONDS
        ):
            times = [[0.0] * len(row) for row in rows]
            stretches.append((times, hosts))
        for row, more in zip(times, rows):
            row[:] = [a + b for a, b in zip(row, more)]
    return stretches
