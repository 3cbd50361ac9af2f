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
        branch: Number of the line of saves it belongs to.
        run: Identity of the run.
        step: Committed updates.
        epoch: Completed epochs.
    """

    name: str
    sequence: int
    branch: int
    run: str
    step: int
    epoch: int


@dataclass(frozen=True)
class Branch:
    """A line of saves.

    Attributes:
        number: Its number.
        base: Sequence of the save that it continues from; later saves of the line before are abandoned. `None` for the first.
        parent: Number of the line it left.
    """

    number: int
    base: int | None = None
    parent: int | None = None


def history_name(*, step_mode: bool, epoch: int, global_step: int) -> str:
    """Return the history name of a state: `ckpt-s{global_step:012d}` in step mode, else `ckpt-e{epoch:06d}`."""
    return f"ckpt-s{global_step:012d}" if step_mode else f"ckpt-e{epoch:06d}"


def is_history(name: str) -> bool:
    """Whether the library gives such a name to history."""
    return _HISTORY.fullmatch(name) is not None


def belongs(record: Record, branches: Iterable[Branch]) -> bool:
    """Whether a record lies on the line that the last branch ends.

    Args:
        record: The record.
        branches: All branches in the order they were made.
    """
    by_number = {branch.number: branch for branch in branches}
    current = max(by_number, default=0)
    limit: float = float("inf")
    while current in by_number:
        if record.branch == current and record.sequence <= limit:
            return True
        branch = by_number[current]
        if branch.base is None or branch.parent is None:
            break
        limit = min(limit, branch.base)
        current = branch.parent
    return False


def to_delete(records: Iterable[Record], *, keep: int, protected: Collection[int]) -> list[str]:
    """Return the history names that retention gives up, oldest first.

    Args:
        records: Complete checkpoints of the line.
        keep: How many to keep; 0 keeps all.
        protected: Sequences that stay whatever their age.
    """
    history = sorted((record for record in records if is_history(record.name)), key=lambda record: record.sequence)
    if keep <= 0:
        return []
    return [record.name for record in history[:-keep] if record.sequence not in protected]
