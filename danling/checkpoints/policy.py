"""When, under which names and for how long: pure functions of what was recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_HISTORY = re.compile(r"ckpt-(e\d{6,}|s\d{12,})")


@dataclass(frozen=True)
class Record:
    """What is known of a complete checkpoint without reading it.

    Attributes:
        name: `latest`, `best`, `model` or a history name.
        sequence: Number of the save that made it, in the order saves were made; names of one save share it.
        branch: Number of the line of saves it belongs to. Going back to an older checkpoint begins a new line.
        line: `(branch, last sequence)` of the lines that this one continues, from the oldest.
        run: Identity of the run.
        step: Committed updates.
        epoch: Completed epochs.
    """

    name: str
    sequence: int
    branch: int
    line: tuple[tuple[int, int], ...]
    run: str
    step: int
    epoch: int


@dataclass(frozen=True)
class Line:
    """Where the saves of this process belong.

    Attributes:
        branch: Their branch.
        ancestors: As `Record.line`.
        sequence: Number of the last save in the directory.
    """

    branch: int
    ancestors: tuple[tuple[int, int], ...]
    sequence: int


def history_name(*, step_mode: bool, epoch: int, global_step: int) -> str:
    """Return the history name of a state: `ckpt-s{global_step:012d}` in step mode, else `ckpt-e{epoch:06d}`."""
    return f"ckpt-s{global_step:012d}" if step_mode else f"ckpt-e{epoch:06d}"


def is_history(name: str) -> bool:
    """Whether the library gives such a name to history."""
    return _HISTORY.fullmatch(name) is not None


def is_name(name: str) -> bool:
    """Whether the library gives such a name to a checkpoint."""
    return name in ("latest", "best", "model") or is_history(name)


def newest(records: Iterable[Record]) -> Record | None:
    """Return a record of the last save; `None` when there are no records."""
    return max(records, key=lambda record: record.sequence, default=None)


def on_line(record: Record, branch: int, ancestors: Iterable[tuple[int, int]]) -> bool:
    """Whether a record lies on a line of saves, and not on one that was abandoned."""
    if record.branch == branch:
        return True
    return any(record.branch == number and record.sequence <= last for number, last in ancestors)


def next_line(records: Collection[Record], resumed: Record | None) -> Line:
    """Return where a process saves that goes on from `resumed`, or from scratch."""
    last = newest(records)
    if last is None:
        return Line(0, (), 0)
    if resumed is not None and resumed.sequence == last.sequence:
        return Line(resumed.branch, resumed.line, last.sequence)
    branch = max(record.branch for record in records) + 1
    ancestors = () if resumed is None else (*resumed.line, (resumed.branch, resumed.sequence))
    return Line(branch, ancestors, last.sequence)


def to_delete(records: Iterable[Record], *, keep: int, protected: Collection[int]) -> list[str]:
    """Return the history names that retention gives up, oldest first."""
    history = sorted((record for record in records if is_history(record.name)), key=lambda record: record.sequence)
    if keep <= 0:
        return []
    return [record.name for record in history[:-keep] if record.sequence not in protected]
