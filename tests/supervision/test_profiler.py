"""Traces that a stock JSON reader reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.config import RunnerConfig
from danling.runners.state import TrainState
from danling.supervision import Profiler
from danling.training import UpdateOutcome


def begun(directory: Path, rank: int = 0, **settings: Any) -> Profiler:
    config = RunnerConfig({"profiling": {"trace_dir": directory.name, **settings}})
    paths = SimpleNamespace(dir=directory.parent)
    state = SimpleNamespace(train=TrainState())
    runner: Any = SimpleNamespace(
        rank=rank, state=state, config=config, workspace=paths, device=torch.device("cpu")
    )
    return Profiler(runner)


def update(profiler: Profiler, step: int) -> None:
    profiler._runner.state.train.global_step = step
    profiler.update_ended(UpdateOutcome(True, 1.0, 0.0, 1.0))


def work() -> None:
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def mm_calls(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events.*")
def test_one_trace_a_cycle_with_the_active_updates_in_it(tmp_path: Path) -> None:
    profiler = begun(tmp_path / "profiles", rank=2, wait=1, warmup=1, active=3, repeat=2)
    for step in range(101, 121):
        work()
        update(profiler, step)
    names = [path.name for path in profiler.traces]
    assert names == [f"rank-00002-step-{step:012d}.pt.trace.json" for step in (105, 110)]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == names
    assert [mm_calls(path) for path in profiler.traces] == [3, 3]
    profiler.close()
    once = begun(tmp_path / "once", wait=0, warmup=1, active=1)
    for step in range(9):
        update(once, step)
    assert len(once.traces) == 1


def test_early_end_of_a_run_keeps_the_record(tmp_path: Path) -> None:
    profiler = begun(
        tmp_path / "some",
        wait=1,
        warmup=1,
        active=10,
        repeat=0,
        record_shapes=True,
        profile_memory=True,
    )
    for step in range(5):
        work()
        update(profiler, step)
    profiler.close()
    profiler.close()
    assert [mm_calls(path) for path in profiler.traces] == [3]
    nothing = begun(tmp_path / "none", wait=5, warmup=1, active=1)
    update(nothing, 1)
    nothing.close()
    assert list((tmp_path / "none").iterdir()) == []
