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


@dataclass(frozen=True)
class LostTime:
    """How many seconds longer than the median of the others a rank was busy, and the activity in which it differs most from them."""

    seconds: float
    cause: str


@dataclass(frozen=True)
class SlowRank:
    """A rank that holds the others up: its machine, the share of the time that it costs, and what it spends that time with."""

    rank: int
    host: str | None
    share: float
    cause: str

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        cause = "waiting for data" if self.cause == "data" else self.cause
        return f"rank {self.rank}{where} costs {100 * self.share:.0f}% ({cause})"


def lost_times(times: Sequence[Sequence[float]]) -> list[LostTime]:
    """Return what each rank costs the others."""
    if len(times) < 2:
        return [LostTime(0.0, "computing") for _ in times]
    busy = [sum(row[: len(ACTIVITIES)]) - row[_WAITING] for row in times]
    usual = _middles_of_others(busy)
    causes = [index for index in range(len(ACTIVITIES)) if index != _WAITING]
    middles = {index: _middles_of_others([row[index] for row in times]) for index in causes}
    found = []
    for rank, row in enumerate(times):
        cause = max(causes, key=lambda index: row[index] - middles[index][rank])
        found.append(LostTime(max(busy[rank] - usual[rank], 0.0), ACTIVITIES[cause]))
    return found


def _middles_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the middle one of the others, the lower of two."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    middle = (len(values) - 2) // 2
    place = {index: number for number, index in enumerate(order)}
    return [values[order[middle if place[index] > middle else middle + 1]] for index in range(len(values))]


class RankTimes:
    """Collects what the ranks spend their time with, from one log line to the next, and judges it."""

    def __init__(self, watch: RankWatch, share: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._watch = watch
        self._share = share
        self._clock = clock
        self._opened = clock()
        self._pending: list[list[float]] = []
        self._told_hosts: list[str | None] = []

    def own(self, waited_for_data: float) -> list[float]:
        """Return the times of this rank since the last call, and the number of looks they come from, as the collective carries them."""
        now = self._clock()
        elapsed, self._opened = now - self._opened, now
        seen, looks = self._watch.take()
        data = min(waited_for_data, elapsed)
        # What was seen divides the rest; without a look it counts as computing.
        others = seen[1:] if any(seen[1:]) else [1.0, *[0.0] * (len(ACTIVITIES) - 2)]
        return [data, *((elapsed - data) * value / sum(others) for value in others), float(looks)]

    def judge(self, rows: Sequence[Sequence[float]]) -> SlowRank | None:
        """Return the rank that holds the others up, if it costs more than the share, with these rows and those before them.

        Sampled times are uncertain: rows that are too few to tell are kept, and later ones add to them.
        """
        if len(self._pending) != len(rows):
            self._pending = [[0.0] * len(row) for row in rows]
        self._pending = [[old + new for old, new in zip(*pair)] for pair in zip(self._pending, rows)]
        pending = self._pending
        if len(pending) < 2 or min(row[-1] for row in pending) < _FEWEST_SAMPLES:
            return None
        lost = lost_times(pending)
        rank = max(range(len(lost)), key=lambda index: lost[index].seconds)
        seconds = sum(pending[rank][:-1])
        needed = max(self._share * seconds, _uncertainty(pending))
        if lost[rank].seconds <= needed:
            if seconds > _JUDGED_SECONDS:
                self._pending = []
            return None
        self._pending = []
        hosts = self._watch.hosts()
        host = hosts[rank] if rank < len(hosts) else None
        return SlowRank(rank, host, lost[rank].seconds / seconds, lost[rank].cause)

    def record(self, rows: Sequence[Sequence[float]]) -> dict[str, object]:
        """Return what `metrics.jsonl` has of them: lists of seconds by rank for each activity, and the hosts where they have changed."""
        record: dict[str, object] = {
            name: [round(row[index], 4) for row in rows] for index, name in enumerate(ACTIVITIES)
        }
        hosts = list(self._watch.hosts())
        if hosts != self._told_hosts:
            record["hosts"] = self._told_hosts = hosts
        return record


def _uncertainty(rows: Sequence[Sequence[float]]) -> float:
    """Return by how many seconds the busiest of even ranks may seem to differ, since their times come from so many looks."""
    seconds = max(sum(row[:-1]) for row in rows)
    variances = []
    for row in rows:
        total = sum(row[:-1])
        busy = 1 - row[_WAITING] / total if total else 0.0
        variances.append(2 * busy * (1 - busy) / max(row[-1], 1.0))
    # The largest of n normal numbers is about sqrt(2 ln n).
    return seconds * math.sqrt(max(variances)) * (_CERTAIN + math.sqrt(2 * math.log(len(rows))))


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
    lost: dict[tuple[int, str | None], defaultdict[str, float]] = {}
    training = 0.0
    for times, hosts in _stretches(records):
        training += max(map(sum, times))
        for rank, (row, cost) in enumerate(zip(times, lost_times(times))):
            key = rank, hosts[rank] if rank < len(hosts) else None
            totals[key] = [a + b for a, b in zip(totals.get(key, [0.0] * len(row)), row)]
            lost.setdefault(key, defaultdict(float))[cost.cause] += cost.seconds
    rows = []
    for (rank, host), row in totals.items():
        causes = lost[rank, host]
        seconds = sum(causes.values())
        cause = max(causes, key=lambda name: causes[name]) if seconds else None
        rows.append(RankRow(rank, host, seconds, seconds / (training or 1.0), cause, dict(zip(ACTIVITIES, row))))
    return sorted(rows, key=lambda row: (-row.lost, row.rank))


_Stretch = tuple[list[list[float]], list[Any]]
"""Times of ranks, and their machines, over so many lines that what looks have missed evens out."""


def _stretches(records: Sequence[Mapping[str, object]]) -> list[_Stretch]:
    found: list[_Stretch] = []
    hosts: list[Any] = []
    for record in records:
        ranks = record.get("ranks")
        times = _times_of(ranks)
        if not times or not isinstance(ranks, Mapping):
            continue
        if isinstance(ranks.get("hosts"), list):
            hosts = [host if isinstance(host, str) else None for host in ranks["hosts"]]
        last = found[-1] if found else None
        if last is None or max(map(sum, last[0])) > _STRETCH_SECONDS or last[1] != hosts or len(last[0]) != len(times):
            found.append((times, hosts))
        else:
            found[-1] = ([[a + b for a, b in zip(*pair)] for pair in zip(last[0], times)], hosts)
    return found


def _times_of(ranks: object) -> list[list[float]]:
    """Return the seconds of each rank by activity; nothing where a line has none that can be read."""
    columns = [ranks.get(name) for name in ACTIVITIES] if isinstance(ranks, Mapping) else []
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) != len(ACTIVITIES) or len({len(column) for column in lists}) != 1:
        return []
    rows = [list(row) for row in zip(*lists)]
    return rows if all(isinstance(value, (int, float)) for row in rows for value in row) else []
