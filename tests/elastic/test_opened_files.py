"""A rank that is left opens neither a checkpoint nor the program between the end of another one and the next update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guarantees.test_kill_at_every_call import has_strace

from .opened import traced_files
from .supervised import Ended, train_ranks

_NEEDS_STRACE = pytest.mark.skipif(
    not has_strace(), reason="strace is not installed, or may not look into a process of ours"
)


def _opened(ended: Ended, directory: Path) -> dict[int, list[tuple[float, str]]]:
    """Return what each rank that has ended by itself has opened."""
    found = {
        note["pid"]: [tuple(each) for each in note["opened"]]
        for note in ended.notes
        if "opened" in note
    }
    for note in ended.notes:
        log = directory / f"strace.{note['pid']}"
        if "end" in note and log.exists():
            found[note["pid"]] = traced_files(log)
    return found


def _in_change(notes: list[dict[str, Any]], pid: int, opened: list[tuple[float, str]]) -> list[str]:
    """Return what a rank has opened between the end of the other one and its next update."""
    struck = next(note["struck"] for note in notes if "struck" in note)
    again = next(note["again"] for note in notes if "again" in note and note["pid"] == pid)
    return [path for at, path in opened if struck <= at <= again]


@pytest.mark.parametrize(
    "victim", [pytest.param(0, id="the main process"), pytest.param(1, id="another rank")]
)
@pytest.mark.parametrize("tool", ["audit", pytest.param("strace", marks=_NEEDS_STRACE)])
def test_rank_that_is_left_opens_no_checkpoint_and_no_program(
    victim: int, tool: str, tmp_path: Path
) -> None:
    settings = {"steps": 120, "checkpoint": {"interval": 2, "async_enabled": False}}
    ended = train_ranks(
        3, tmp_path, faults=f"{victim}:leaf:15:kill", settings=settings, OPENED=tool
    )
    assert not ended.verdict and -9 in ended.codes
    survivors = {note["pid"]: note for note in ended.ends if note["changes"][0][0] == 3}
    assert len(survivors) == 2
    opened = _opened(ended, tmp_path)
    has_seen = False
    for pid, note in survivors.items():
        in_change = _in_change(ended.notes, pid, opened[pid])
        assert not [path for path in in_change if path.endswith((".py", ".pyc", ".pth"))]
        if note["rank"] == 0:
            # It writes from here on: the log, the lock, metrics, and the records of the checkpoints, which name them.
            assert all(
                path.startswith(str(tmp_path / "run")) for path in in_change if path.startswith("/")
            )
            has_seen = any(".pth" in path for _, path in opened[pid])
        else:
            assert not [path for path in in_change if str(tmp_path) in path]
    assert has_seen, "the saves of the main process are to be among what the tool sees"
