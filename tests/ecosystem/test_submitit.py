"""submitit: jobs that are preempted, requeued and resumed.

Library: submitit
Works: `examples/sweeps/jobs.py` with the local executor: preemption, requeue
Exact: the weights of a preempted job
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import patience
from support.process_tree import descendants
from support.warm import interpreter

SWEEPS = Path(__file__).parents[2] / "examples" / "sweeps"


def weights(root: Path) -> dict[str, torch.Tensor]:
    (file,) = root.glob("jobs/*/checkpoints/latest.pth")
    payload: dict[str, Any] = torch.load(file, weights_only=True)
    return dict(payload["model"])


def test_preempted_job_is_requeued_and_ends_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    cloudpickle = importlib.import_module("cloudpickle")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    monkeypatch.syspath_prepend(str(SWEEPS))
    jobs: Any = importlib.import_module("jobs")
    cloudpickle.register_pickle_by_value(
        jobs
    )  # as of a program of one's own, which the job could not import either
    with (
        monkeypatch.context() as warm
    ):  # tasks are forks that have torch loaded; of the controller its own process id is asked for
        warm.setattr(sys, "executable", interpreter())
        executor = jobs.make_executor(tmp_path)
    whole, parts = (jobs.settings_of(tmp_path / name, 1e-2, 16) for name in ("whole", "parts"))
    preempted, left_alone = (
        executor.submit(jobs.Training(), parts),
        executor.submit(jobs.Training(), whole),
    )
    end = time.monotonic() + patience(100)
    while "epoch 2: " not in (preempted.stderr() or ""):
        assert time.monotonic() < end and not preempted.done(), preempted.stderr()
        time.sleep(0.005)
    # As SLURM does: to the tasks. Here the controller is the process that was started, of which a task is a child.
    (task,) = (
        pid for pid, command in descendants(preempted._process.pid).items() if "submitit" in command
    )
    os.kill(task, signal.SIGUSR1)
    assert preempted.result() == left_alone.result()
    said = preempted.stderr() or ""
    assert (
        "Stopped" in said
        and "Requeued job" in (preempted.stdout() or "") + said
        and "Resumed from latest" in said
    )
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )
    sys.modules.pop("jobs")
