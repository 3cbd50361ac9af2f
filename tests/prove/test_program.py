"""A user's program as a child process: it is told settings, its output is kept, and nothing of it is left."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from support.patience import patience

from danling.prove.program import run_program

SHOWS = "import os; print(os.environ['DANLING_SETTINGS'], os.environ['MARK']); raise SystemExit(7)"


def test_it_is_told_the_settings_and_its_end_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "here")
    log = tmp_path / "new" / "output.log"
    end = run_program([sys.executable, "-c", SHOWS], {"seed": 3}, log=log)
    assert end.code == 7 and end.log == log
    assert end.tail.strip() == '{"seed": 3} here'


def test_program_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('begins', flush=True); time.sleep(60)"]
    end = run_program(command, {}, log=tmp_path / "log", timeout=0.5)
    assert end.code is None and end.tail in ("", "begins\n")


def test_processes_left_by_a_program_are_ended_with_it(tmp_path: Path) -> None:
    leaves = f"import subprocess; print(subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)']).pid)"
    end = run_program([sys.executable, "-c", leaves], {}, log=tmp_path / "log")
    assert end.code == 0
    give_up = time.monotonic() + patience(20)
    while _runs(int(end.tail)):
        assert time.monotonic() < give_up


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_program_without_a_start_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-- python train.py"):
        run_program(["no-such-program-here"], {}, log=tmp_path / "log")
