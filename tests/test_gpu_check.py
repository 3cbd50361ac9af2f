"""`scripts/gpu_check.py`: the checks for the day on which there is a GPU work, on the CPU with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def run(*words: str, timeout: float = 60.0) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the script on the CPU; return its exit code, what it printed, and its records."""
    out = Path("found")
    command = [sys.executable, str(SCRIPT), "--cpu", "--out", str(out), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(timeout))
    results = out / "results.jsonl"
    records = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    return ended.returncode, ended.stdout + ended.stderr, records


def test_checks_are_listed_with_their_limits() -> None:
    code, output, _ = run("--list")
    assert code == 0
    for name in (
        "resume_bf16",
        "waits",
        "ranks",
        "gpt_compiled",
        "saves_1b",
        "attention",
        "kernels",
        "tests",
    ):
        assert f"\n{name} " in output


def test_unknown_check_is_refused() -> None:
    code, output, records = run("--only", "environment,resumes")
    assert code == 2 and "Received: resumes." in output and not records


def test_too_long_check_is_killed_and_one_without_time_is_left_out() -> None:
    code, output, records = run("--only", "environment", "--patience", "0.001")
    assert (
        code == 1
        and records[0]["error"] == "killed at its time limit"
        and "1 of 1 failed" in output
    )
    code, output, records = run("--only", "environment", "--budget", "0.5")
    assert code == 0 and records[1]["left_out"] == "no time" and "1 left out" in output


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_check_works_on_the_cpu() -> None:
    code, output, records = run("--jobs", "2", "--budget", "2000", "--patience", "8", timeout=2200)
    assert code == 0, output
    listed = [line.split()[0] for line in run("--list")[1].splitlines()]
    assert sorted(record["check"] for record in records) == sorted(listed)
    assert not any("left_out" in record for record in records)
