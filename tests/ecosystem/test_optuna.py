"""Optuna: a search that prunes trials, and goes on after a kill.

Library: optuna
Works: `examples/sweeps/search.py`: pruning, a study in SQLite
Exact: a trial that was killed goes on from its checkpoint, and its scores are those of the attempt before
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.job import Job
from support.programs import run_program
from support.warm import interpreter

SEARCH = Path(__file__).parents[2] / "examples/sweeps/search.py"


def test_killed_search_continues_its_running_trial() -> None:
    optuna = pytest.importorskip("optuna")
    budget = ("--trials", "5", "--epochs", "4")
    with Job([interpreter(), str(SEARCH), *budget]) as job:
        # In the middle of the second trial, with a checkpoint to go on from.
        saved = Path("search/trials")
        job.wait_until(
            lambda: (
                len(list(saved.glob("*/checkpoints/latest.pth")))
                == job.output.count(" epoch 2: ")
                == 2
            )
        )
        job.kill()
    code, output = run_program(SEARCH, *budget)
    assert code == 0, output
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
    code, output = run_program(SEARCH, *budget)  # has nothing left to do
    assert code == 0 and "best val accuracy" in output, output
