"""`.ci/run` ends at the first stage that fails, with its exit status, and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.pages import ROOT

MAKE = """#!/usr/bin/env bash
echo "$*" >>stages.txt
case $* in
  *--install*) echo $$ >installing; exec sleep 60 ;;
  "$FAILING") while [ ! -s installing ]; do sleep 0.01; done; cat "$STACKS"; echo "E   AssertionError: 3"; exit 7 ;;
esac
"""


STACKS = """\
Thread 0x00007f6793fff6c0 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 294 in accept
  File "/home/user/danling/a.py", line 12 in wait

Current thread 0x00007f688d28ab80 (most recent call first):
  File "/home/user/danling/b.py", line 9 in train
Timeout
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the script, in which `make` writes down the stages."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "make").write_text(MAKE)
    (tmp_path / "programs" / "make").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("failing", ["lint", "test", "test-tenth TENTH=3", "test-system"])
def test_failing_stage_ends_the_run_with_its_exit_status(failing: str, clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to("/bin/true")
    variables = {
        **os.environ,
        "PATH": f"{clone / 'programs'}:{os.environ['PATH']}",
        "FAILING": failing,
        "STACKS": str(clone / "stacks.txt"),
    }
    (clone / "stacks.txt").write_text(STACKS)
    done = subprocess.run(
        [clone / ".ci" / "run", "3"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7
    assert "failed with exit status 7" in done.stderr
    if failing != "lint":  # its output is short
        assert (
            "at < socket.py:294 accept < a.py:12 wait\nat < b.py:9 train\nE   AssertionError: 3\n"
            in done.stderr
        )
    stages = [
        line for line in (clone / "stages.txt").read_text().splitlines() if "--install" not in line
    ]
    assert stages[-1] == failing
    installing = int((clone / "installing").read_text())
    assert not Path(f"/proc/{installing}").exists()
