"""Ranks that are away for long and come back are not killed: a suspended job, a long call of C, a debugger."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Collection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.patience import until
from support.process_tree import descendants

from . import plain_loop
from .plain_loop import HELD_SECONDS
from .supervised import run_ranks
from .test_command import notes_of, started

_FENCE = 0.3
"""Far less than the ranks are away."""
_ATTACH, _DETACH = 16, 17
_OF_ANY_THREAD = 0x40000000


@pytest.mark.parametrize(
    ("faults", "codes"),
    [
        pytest.param("1:leaf:10:hold", [0, 0, 0], id="while the others wait in a collective"),
        pytest.param(
            "1:leaf:10:hold;2:leaf:10:kill",
            [-9, 0, 0, 0],
            id="while the others form without a third",
        ),
    ],
)
def test_rank_in_a_long_call_of_c_is_not_killed(
    faults: str, codes: list[int], tmp_path: Path
) -> None:
    assert HELD_SECONDS > 4 * _FENCE
    variables = {"FAULTS": faults, "FENCE": str(_FENCE)}
    ended = run_ranks(plain_loop.main, 3, tmp_path / "report", variables=variables)
    assert not ended.verdict
    assert sorted(ended.codes) == codes
    assert ended.hashes == {plain_loop.undisturbed(plain_loop.UPDATES)}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class _Debugger:
    """Attaches to all threads of a rank as gdb does, and leaves them later."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._trace = ctypes.CDLL(None, use_errno=True).ptrace
        self._trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._threads: list[int] = []
        self._until = 0.0
        self.states: set[str] = set()
        self.has_left = False

    def __call__(self, living: Collection[BaseProcess], replacements: Collection[int]) -> None:
        notes = [json.loads(line) for line in self._report.read_text().splitlines()]
        pids = [note["pid"] for note in notes if note.get("paused") == 1]
        if self.has_left or not pids:
            return
        if not self._threads:
            self._attach(pids[0])
        self.states.add(_state(pids[0]))
        if time.monotonic() > self._until:
            for thread in self._threads:
                self._call(_DETACH, thread)
            self.has_left = True
            Path(f"{self._report}.continue").touch()

    def _attach(self, pid: int) -> None:
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
            self._call(_ATTACH, thread)
            os.waitpid(thread, _OF_ANY_THREAD)
            self._threads.append(thread)
        self._until = time.monotonic() + 4 * _FENCE

    def _call(self, request: int, thread: int) -> None:
        if self._trace(request, thread, None, None) != 0:
            number = ctypes.get_errno()
            if request == _ATTACH and number in (1, 38):
                pytest.skip(
                    f"this machine lets no process trace another one: {os.strerror(number)}"
                )
            raise OSError(number, os.strerror(number))


def test_rank_under_a_debugger_is_not_killed(tmp_path: Path) -> None:
    debugger = _Debugger(tmp_path / "report")
    variables = {"FENCE": str(_FENCE), "PAUSE_AT": "5"}
    ended = run_ranks(
        plain_loop.main, 3, tmp_path / "report", variables=variables, disturb=debugger
    )
    assert debugger.has_left and debugger.states == {"t"}
    assert ended.codes == [0, 0, 0] and not ended.verdict
    assert ended.hashes == {plain_loop.undisturbed(plain_loop.UPDATES)}


def test_job_that_was_suspended_loses_no_rank(tmp_path: Path) -> None:
    # More than the second that one look of the agent counts at most, and less than the job is stopped.
    fence, stopped_for = 2.0, 5.0
    updates = 60
    with started(tmp_path, "", updates, FENCE=str(fence), PAUSE_AT="5") as process:
        until(lambda: len([note for note in notes_of(tmp_path) if "paused" in note]) == 2)
        ranks = [
            note["pid"]
            for note in sorted(notes_of(tmp_path), key=lambda note: note.get("paused", -1))
            if "paused" in note
        ]
        job = [process.pid, *descendants(process.pid)]
        assert set(ranks) <= set(job)
        for pid in job:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(_state(pid) == "T" for pid in job))
        time.sleep(stopped_for)
        for pid in [pid for pid in job if pid != ranks[1]]:
            os.kill(pid, signal.SIGCONT)
        # The agent sees one rank stopped and the other one not.
        time.sleep(0.3)
        os.kill(ranks[1], signal.SIGCONT)
        (tmp_path / "report.continue").touch()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "a replacement is started" not in output
    ends = [note for note in notes_of(tmp_path) if "end" in note]
    assert [(note["end"], note["changes"]) for note in ends] == [
        (plain_loop.undisturbed(updates), 0)
    ] * 2
