"""A sharded run whose machines are lost goes on elsewhere on another number of processes and at another layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.layouts import LayoutRunner
from support.object_servers import ObjectServer
from support.processes import run_processes
from torch import Tensor

from danling.utils.tensors import canonical_name, whole

LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "FSDP 2": {"shard": 2}, "TP 2": {"tensor": 2}}


class StoppedRunner(LayoutRunner):
    """Stops where it is told."""

    stop_at: int | None = None

    def step(self) -> Any:
        """Ask for a stop with the update that is the last one."""
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        return super().step()


def train(config: dict[str, Any], stop_at: int | None) -> tuple[int, dict[str, Tensor]]:
    with StoppedRunner(config, model={"depth": 2, "dropout": 0.0, "experts": 0}) as runner:
        runner.stop_at, begun = stop_at, runner.state.train.global_step
        runner.train()
        found = {
            f"model.{canonical_name(name)}": value
            for name, value in runner.model_state_dict().items()
        }
        for name, entry in runner.optimizer_state_dict()["state"].items():
            found |= {f"optimizer.{name}.{key}": value for key, value in entry.items()}
        return begun, {name: whole(value).clone() for name, value in found.items()}


def run(
    root: Path, layout: str, url: str | None, *, stop_at: int | None = None
) -> tuple[int, dict[str, Tensor]]:
    axes = LAYOUTS[layout]
    replicas = axes.get("shard", 1)
    config: dict[str, Any] = {
        "workspace_root": str(root),
        "auto_resume": True,
        "seed": 5,
        "steps": 5,
        "accum_steps": 2,
        "log": False,
        "evaluate_interval": 5,
        "try_evaluation": False,
        "optim": {"type": "adamw", "lr": 1e-2},
        "checkpoint": {"interval": 1, "backend": "dcp", "remote.url": url},
        "dataloader": {"batch_size": 12 // replicas},
        "stack": "parallel",
        "parallel": {"axes": axes},
    }
    world = math.prod(axes.values())
    return run_processes(train, config, stop_at, world_size=world, timeout=100)[0]


def test_goes_on_at_other_layouts_on_empty_machines(
    tmp_path: Path, moto: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{moto.make_bucket()}/runs"
    _, uninterrupted = run(tmp_path / "alone", "one", None)
    assert run(tmp_path / "0", "FSDP 2", url, stop_at=1)[0] == 0
    assert run(tmp_path / "1", "TP 2", url, stop_at=2)[0] == 1
    begun, ended = run(tmp_path / "2", "one", url)
    assert begun == 2
    assert uninterrupted.keys() == ended.keys()
    assert (
        max((value - ended[name]).abs().max().item() for name, value in uninterrupted.items())
        < 1e-9
    )
