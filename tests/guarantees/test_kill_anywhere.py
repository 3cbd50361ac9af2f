"""G2: a run that is killed at random instants, also inside saves, ends as the one that was left alone.

`make chaos N=200` kills each run that often; here it is a few times.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import ProcessFailure, run_outcomes, run_processes
from support.toys import TracingRunner, differences, whole_state
from torch import Tensor
from torch.utils._pytree import tree_map

from danling.runners.parallel_runner import ParallelRunner
from danling.utils.tensors import whole

KILLS = int(os.environ.get("CHAOS_KILLS", "3"))


class SlowRunner(TracingRunner):
    """Takes its time over a step, so that a kill meets it at work."""

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Wait, then train."""
        time.sleep(0.03)
        return super().train_step(data)


class SlowParallelRunner(SlowRunner, ParallelRunner):
    """The same on a mesh."""


def settings(root: Path, backend: str, mode: str, axes: dict[str, int] | None = None) -> dict[str, Any]:
    layout = {"stack": "parallel", "parallel": {"axes": axes}} if axes else {}
    return {
        **layout,
        "steps": 30 + 10 * KILLS,  # over four seconds of waiting: no attempt that is killed can be the whole run
        "seed": 3,
        "accum_steps": 2,
        "ema": {"enabled": True, "decay": 0.9},
        "dataloader": {"batch_size": 2, "drop_last": False},
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine"},
        "evaluate_interval": 5,
        "auto_resume": True,
        "workspace_root": str(root),
        "checkpoint": {"backend": backend, "async_mode": mode, "interval": 1, "keep_latest_k": 3},
        "log_interval": 1000,
    }


def train(config: dict[str, Any]) -> dict[str, Any]:
    kind = SlowParallelRunner if "parallel" in config else SlowRunner
    with kind(config) as runner:
        runner.train()
        return tree_map(lambda value: whole(value) if isinstance(value, Tensor) else value, whole_state(runner))


@pytest.mark.timeout(360 + 12 * KILLS)
@pytest.mark.parametrize(
    ("backend", "mode", "world_size", "axes"),
    [
        ("file", "disabled", 1, None),
        ("file", "async", 2, None),
        pytest.param("dcp", "disabled", 2, None, marks=pytest.mark.slow),
        ("dcp", "async", 2, None),
        ("dcp", "async", 2, {"shard": 2}),
        ("dcp", "async", 2, {"pipeline": 2}),
    ],
)
def test_killed_again_and_again(
    backend: str, mode: str, world_size: int, axes: dict[str, int] | None, tmp_path: Path
) -> None:
    uninterrupted = run_processes(
        train, settings(tmp_path / "whole", backend, mode, axes), world_size=world_size, timeout=150 + KILLS
    )
    config = settings(tmp_path / "parts", backend, mode, axes)
    instants = random.Random(f"{backend} {mode} {world_size}")
    kills = 0
    for _ in range(KILLS):
        outcomes = run_outcomes(train, config, world_size=world_size, timeout=instants.uniform(0.3, 2.0))
        if all(outcome.error is None for outcome in outcomes):
            break
        assert all(outcome.error is None or isinstance(outcome.error, ProcessFailure) for outcome in outcomes), outcomes
        kills += 1
    ended = run_processes(train, config, world_size=world_size, timeout=150 + KILLS)
    assert kills > 0
    for rank in range(world_size):
        assert differences(ended[rank], uninterrupted[rank]) == []
    assert not list(tmp_path.rglob(".staged-*"))
