"""Tasks that SLURM starts at once: those without ranks are refused, and none where single runs are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.toys import Line, settings


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("stack", ["ddp", "accelerate", "parallel"])
def test_several_tasks_without_ranks_are_refused(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(
        ValueError, match=r"each of the 4 tasks that srun has started.*set WORLD_SIZE=1"
    ):
        Line(settings(tmp_path, steps=1, stack=stack))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "4", "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4"},
    ],
)
def test_single_runs_and_ranks_train(
    variables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Line(settings(tmp_path, steps=1)) as runner:
        runner.train()
        assert runner.world_size == 1 and runner.state.train.global_step == 1
