"""Signals to one rank and to all, in training and in evaluation, under torchrun: the run stops whole and goes on exactly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job
from support.processes import run_processes
from support.programs import python, run_program, run_python, torchrun
from support.toys import differences
from tensorboard.backend.event_processing import event_accumulator

from danling.reporting import read_jsonl

SCRIPT = Path(__file__).with_name("signals_job.py")
EPOCHS = ("--epochs", "2")
STEPS = ("--steps", "16", "--evaluate_interval", "8", "--checkpoint.interval", "8")


def send(job: Job, number: int, ranks: list[int], where: str) -> None:
    """Send a signal to ranks once all of them are slow in `where`."""
    files = [Path(f"{where}-{rank}.pid") for rank in range(2)]
    job.wait_until(lambda: all(file.exists() for file in files))
    job.wait_until(lambda: steps_logged() >= 5)
    for rank in ranks:
        os.kill(int(files[rank].read_text()), number)


def steps_logged() -> int:
    file = Path("run/metrics.jsonl")
    return max((record["step"] for record in read_jsonl(file)), default=0) if file.exists() else 0


def exit_codes() -> list[str]:
    return [Path(f"exit-{rank}").read_text() for rank in range(2)]


def whole(arguments: tuple[str, ...], directory: Path, nproc: int = 2) -> list[dict[str, Any]]:
    """Return how a run ends that nobody interrupts."""
    directory.mkdir()
    return run_processes(_train, arguments, str(directory), world_size=nproc)


def _train(arguments: tuple[str, ...], directory: str) -> dict[str, Any]:
    os.chdir(directory)
    import runpy
    import sys

    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="signals")["main"]()
    return ended(int(os.environ["RANK"]))


def ended(rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(f"end-{rank}.pt", weights_only=True)
    return state


@pytest.mark.parametrize(
    ("number", "ranks", "where", "arguments"),
    [
        pytest.param(signal.SIGTERM, [1], "train", EPOCHS, id="SIGTERM-one-train"),
        pytest.param(
            signal.SIGUSR1, [0, 1], "train", STEPS, id="SIGUSR1-all-train", marks=pytest.mark.slow
        ),
        pytest.param(signal.SIGINT, [1], "evaluate", STEPS, id="SIGINT-long-rank-evaluate"),
        pytest.param(
            signal.SIGTERM,
            [0],
            "evaluate",
            STEPS,
            id="SIGTERM-short-rank-evaluate",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_stops_all_ranks_and_the_run_goes_on_exactly(
    number: signal.Signals, ranks: list[int], where: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with torchrun(SCRIPT, *arguments, environment={"SLOW": where}) as job:
        send(job, number, ranks, where)
        output = job.wait(40).output
    assert exit_codes() == ["130" if number is signal.SIGINT else "143"] * 2
    assert f"Stopped by {number.name}: " in output
    assert not Path("end-0.pt").exists()
    assert 5 <= steps_logged() <= 16
    resumed = run_processes(_train, arguments, str(tmp_path))
    for own, expected in zip(resumed, whole(arguments, tmp_path / "whole")):
        assert differences(own, expected) == []
    every_step_once(resumed[0]["step"])


def every_step_once(steps: int) -> None:
    wanted = list(range(1, steps + 1))
    assert [
        record["step"] for record in read_jsonl("run/metrics.jsonl") if "train/loss" in record
    ] == wanted
    evaluated = [
        record["step"] for record in read_jsonl("run/metrics.jsonl") if "val/loss" in record
    ]
    assert evaluated == sorted(set(evaluated))
    assert evaluated
    (events,) = Path("run/tensorboard").iterdir()
    curves = event_accumulator.EventAccumulator(str(events)).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == wanted


def test_the_curves_of_a_killed_and_resumed_run_have_every_step_once(tmp_path: Path) -> None:
    arguments = ("--steps", "16", "--evaluate_interval", "8", "--checkpoint.interval", "3")
    with python(SCRIPT, *arguments, environment={"SLOW": "train"}, warm=True) as job:
        job.wait_until(lambda: steps_logged() >= 8)
        job.kill()
    assert run_python(SCRIPT, *arguments, warm=True).exit_code == 0
    every_step_once(16)


def test_torchrun_names_the_failing_rank() -> None:
    exit_code, output = run_program(SCRIPT, *EPOCHS, environment={"RAISE": "1"}, nproc_per_node=2)
    assert exit_code == 1
    assert "Signal 9" not in output, "the other rank had to be killed"
    summary = output[output.index("Root Cause") :]
    assert "ArithmeticError: this rank is broken" in summary
    assert "rank      : 1 " in summary


def test_a_time_budget_stops_in_the_same_way(tmp_path: Path) -> None:
    arguments = ("--epochs", "2")
    first = run_python(
        SCRIPT, *arguments, "--max_time", "1.0", environment={"SLOW": "evaluate"}, warm=True
    )
    assert first.exit_code == 0, first.output
    assert "Stopped: " in first.output
    resumed = run_processes(_train, arguments, str(tmp_path), world_size=1)
    assert differences(resumed, whole(arguments, tmp_path / "whole", 1)) == []


def is_pending(pid: int, number: int) -> bool:
    """Return whether a signal was sent to a process and has not reached it."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return any(int(status[name], 16) >> (number - 1) & 1 for name in ("SigPnd", "ShdPnd"))


def test_a_second_sigint_ends_at_once_also_in_native_code() -> None:
    with python(SCRIPT, *EPOCHS, environment={"SLOW": "native"}, warm=True) as job:
        job.wait_until(lambda: Path("stuck").exists())
        job.signal(signal.SIGINT)
        # Two of them that wait to be delivered are one.
        job.wait_until(lambda: not is_pending(job.pid, signal.SIGINT))
        time.sleep(0.3)
        assert job.running
        job.signal(signal.SIGINT)
        exit_code, _ = job.wait(15)
    assert exit_code in (130, -signal.SIGINT)
    assert not Path("run/checkpoints/latest.pth").exists()
