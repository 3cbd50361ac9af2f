"""The programs with Optuna, submitit and Hydra: killed, preempted and composed, with the real packages."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job
from support.patience import patience
from support.process_tree import descendants
from support.warm import interpreter

SWEEPS = Path(__file__).parents[2] / "examples" / "sweeps"


def run(name: str, *args: str) -> str:
    with Job([interpreter(), str(SWEEPS / name), *args]) as job:
        code, output = job.wait(patience(100))
    assert code == 0, output
    return output


def test_a_search_that_is_killed_goes_on_with_the_trial_that_was_under_way() -> None:
    optuna = pytest.importorskip("optuna")
    command = [interpreter(), str(SWEEPS / "search.py"), "--trials", "5", "--epochs", "4"]
    with Job(command) as job:
        # In the middle of the second trial, with a checkpoint to go on from.
        saved = Path("search/trials")
        job.wait_until(lambda: len(list(saved.glob("*/checkpoints/latest.pth"))) == job.output.count(" epoch 2: ") == 2)
        job.kill()
    output = run("search.py", "--trials", "5", "--epochs", "4")
    study = optuna.load_study(study_name="digits", storage="sqlite:///search/study.db")
    states = optuna.trial.TrialState
    ended = study.get_trials(states=(states.COMPLETE, states.PRUNED))
    (killed,) = study.get_trials(states=(states.FAIL,))
    again = next(trial for trial in ended if trial.params == killed.params)
    assert len(ended) == 5 and len(study.trials) == 6 and (killed.number, again.number) == (1, 2)
    assert len(re.findall(r"Resumed from latest at step \d+, epoch [123]\.", output)) == 1
    # The pruner knows the scores of the attempt before, which are those of the attempt itself.
    assert list(again.intermediate_values) == [1, 2, 3, 4] and again.state == states.COMPLETE
    assert killed.intermediate_values.items() <= again.intermediate_values.items()
    assert len(list(Path("search/trials").iterdir())) == 5
    assert f"best val accuracy {study.best_value:.3f}" in output
    assert "best val accuracy" in run("search.py", "--trials", "5", "--epochs", "4")  # has nothing left to do


def weights(root: Path) -> dict[str, torch.Tensor]:
    (file,) = root.glob("jobs/*/checkpoints/latest.pth")
    payload: dict[str, Any] = torch.load(file, weights_only=True)
    return dict(payload["model"])


def test_a_job_that_is_preempted_is_requeued_and_ends_as_one_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    cloudpickle = importlib.import_module("cloudpickle")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    monkeypatch.syspath_prepend(str(SWEEPS))
    jobs: Any = importlib.import_module("jobs")
    cloudpickle.register_pickle_by_value(jobs)  # as of a program of one's own, which the job could not import either
    executor = jobs.make_executor(tmp_path)
    whole, parts = (jobs.settings_of(tmp_path / name, 1e-2, 16) for name in ("whole", "parts"))
    preempted, left_alone = executor.submit(jobs.Training(), parts), executor.submit(jobs.Training(), whole)
    end = time.monotonic() + patience(100)
    while "epoch 2: " not in (preempted.stderr() or ""):
        assert time.monotonic() < end and not preempted.done(), preempted.stderr()
        time.sleep(0.005)
    # As SLURM does: to the tasks. Here the controller is the process that was started, of which a task is a child.
    (task,) = (pid for pid, command in descendants(preempted._process.pid).items() if "submitit" in command)
    os.kill(task, signal.SIGUSR1)
    assert preempted.result() == left_alone.result()
    said = preempted.stderr() or ""
    assert "Stopped" in said and "Requeued job" in (preempted.stdout() or "") + said and "Resumed from latest" in said
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    sys.modules.pop("jobs")


def test_settings_that_hydra_composes_are_those_of_the_run() -> None:
    pytest.importorskip("hydra")
    output = run("composed.py", "--multirun", "optim=adamw,sgd", "epochs=1", "model.width=16")
    scores = re.findall(r"val accuracy (\S+) in (\S+)", output)
    assert len({place for _, place in scores}) == 2 and all(float(score) > 0.3 for score, _ in scores)
    kinds = [(Path(place) / "metadata/config.full.yaml").read_text() for _, place in scores]
    assert ["type: adamw" in kinds[0], "type: sgd" in kinds[1], "width: 16" in kinds[1]] == [True] * 3
    resumed = run("composed.py", "optim=sgd", "epochs=2", "model.width=16", "auto_resume=true")
    assert f"in {scores[1][1]}" in resumed and "Resumed from" in resumed
