"""`danling run`: the agent of torch starts the ranks, and replaces one that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience
from support.process_tree import kill_tree

from danling.cli.main import main

from . import plain_loop

_HERE = Path(__file__).parent
_UPDATES = 1000
"""More than there are before a replacement is there."""


@contextmanager
def started(
    tmp_path: Path,
    faults: str,
    updates: int,
    *,
    options: Sequence[str] = (),
    ranks: int = 2,
    **more: str,
) -> Iterator[subprocess.Popen[str]]:
    """Run the loop by hand on ranks, and end what is left at the end."""
    variables = {
        **os.environ,
        "FAULTS": faults,
        "REPORT": str(tmp_path / "report"),
        "UPDATES": str(updates),
        "SLOW_UNTIL": "2" if faults else "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_HERE.parents[1]), str(_HERE.parent)]),
        **more,
    }
    command = [
        sys.executable,
        "-m",
        "danling",
        "run",
        "--ranks",
        str(ranks),
        *options,
        "--",
        sys.executable,
        str(_HERE / "plain_loop.py"),
    ]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def notes_of(tmp_path: Path) -> list[dict[str, Any]]:
    report = tmp_path / "report"
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def test_rank_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, "1:reduce:10:kill", updates=_UPDATES) as process:
        output, _ = process.communicate(timeout=patience(240))
    assert process.returncode == 0, output
    notes = notes_of(tmp_path)
    ends = [note for note in notes if "end" in note]
    assert {note["end"] for note in ends} == {plain_loop.undisturbed(_UPDATES)}
    assert [note["number"] for note in notes if "number" in note][-1] == 2
    assert "a replacement is started" in output


def test_error_of_a_rank_is_shown_and_the_others_continue_without_it(tmp_path: Path) -> None:
    with started(
        tmp_path, "1:reduce:10:raise", updates=60, REPLACEMENTS="0", SLOW_UNTIL="0"
    ) as process:
        output, _ = process.communicate(timeout=patience(240))
    assert process.returncode == 0, output
    [end] = [note for note in notes_of(tmp_path) if "end" in note]
    assert (end["end"], end["update"]) == (plain_loop.undisturbed(60), 60)
    assert "ended with exit code 1: it is not replaced, and the others continue" in output
    assert output.count("ZeroDivisionError: a fault of the test") == 1


def test_all_ranks_that_end_and_are_not_replaced_end_the_run(tmp_path: Path) -> None:
    faults = "1:reduce:10:kill;0:reduce:20:kill"
    with started(tmp_path, faults, updates=60, REPLACEMENTS="0", SLOW_UNTIL="0") as process:
        output, _ = process.communicate(timeout=patience(240))
    assert process.returncode == 1, output
    assert "Every rank that had the state of the run has died" in output


def test_second_interrupt_of_the_command_is_passed_on(tmp_path: Path) -> None:
    with started(tmp_path, "", updates=10**9, STUBBORN="1") as process:
        for count in (0, 1):
            wanted = "interrupts" if count else "number"
            end = time.monotonic() + patience(120)
            while (
                len([note for note in notes_of(tmp_path) if wanted in note]) < 2
                and time.monotonic() < end
            ):
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 130, output
    assert [note["interrupts"] for note in notes_of(tmp_path) if "interrupts" in note].count(2) == 2
    assert "Traceback" not in output


def test_sigterm_of_the_command_ends_all_ranks(tmp_path: Path) -> None:
    with started(tmp_path, "", updates=10**9) as process:
        end = time.monotonic() + patience(120)
        while (
            len([note for note in notes_of(tmp_path) if "number" in note]) < 2
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 143, output
    for note in notes_of(tmp_path):
        assert not Path(f"/proc/{note['pid']}").exists()


def test_command_without_a_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2"]) == 2
    assert "-- python train.py" in capsys.readouterr().err
