"""The lines of metrics.jsonl when the main process changes: each is there once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from danling.reporting.jsonl import parse_line
from danling.reporting.telemetry import MEASURED
from danling.utils.files import replacing

Recent = Sequence[tuple[dict[str, float], int]]
"""The last metrics that all ranks have, each with its step."""

_MOST_RECENT = 16


def recent_records(
    records: Iterable[tuple[dict[str, float], int]] = (),
) -> deque[tuple[dict[str, float], int]]:
    """Return a list of records that keeps the last ones only."""
    return deque(records, maxlen=_MOST_RECENT)


def _lines(file: Path) -> list[tuple[bytes, dict[str, object]]]:
    found = []
    for line in file.read_bytes().splitlines(keepends=True):
        record = parse_line(line)
        if line.endswith(b"\n") and record is not None:
            found.append((line, record))
    return found


def _key(values: Sequence[str] | dict[str, float], step: object) -> tuple[object, frozenset[str]]:
    """Return what tells a line from the others, and is the same on all ranks."""
    left_out = {"step", "time", "ranks"} | MEASURED
    return step, frozenset(name for name in values if name.rpartition("/")[2] not in left_out)


def without_later(file: Path, step: int, recent: Recent) -> None:
    """Remove the lines of what the ranks that are left have not made, and one that a kill has left unfinished.

    Args:
        file: `metrics.jsonl`.
        step: Updates that were made.
        recent: What was logged of the last ones.
    """
    if not file.exists():
        return
    known = {_key(values, at) for values, at in recent}
    with replacing(file) as new:
        for line, record in _lines(file):
            at = record["step"]
            assert isinstance(at, int)
            is_of_change = any(name.startswith("elastic/") for name in record)
            is_made = at < step or is_of_change or _key(list(record), at) in known
            if at <= step and is_made:
                new.write(line)


def missing_records(file: Path, recent: Recent) -> list[tuple[dict[str, float], int]]:
    """Return the metrics that the file lacks."""
    there = (
        {_key(list(record), record["step"]) for _, record in _lines(file)}
        if file.exists()
        else set()
    )
    return [(values, step) for values, step in recent if _key(values, step) not in there]
