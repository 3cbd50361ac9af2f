"""A sharded run whose machines are lost goes on elsewhere on another number of processes and at another layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_proxy import FaultProxy
from support.layouts import LayoutRunner
from support.object_servers import ObjectServer
from support.processes import run_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from danling.checkpoints import CheckpointSettings, TorchDistributedCheckpointManager
from danling.distributed import world_of
from danling.remote import RunLayout, open_store
from danling.remote.attach import RunMirror
from danling.remote.mirror import MirrorSettings
from danling.remote.sources import RemoteSources
from danling.utils.tensors import canonical_name, whole

LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "FSDP 2": {"shard": 2}, "FSDP 4": {"shard": 4}, "TP 2": {"tensor": 2}}


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
        found = {f"model.{canonical_name(name)}": value for name, value in runner.model_state_dict().items()}
        for name, entry in runner.optimizer_state_dict()["state"].items():
            found |= {f"optimizer.{name}.{key}": value for key, value in entry.items()}
        return begun, {name: whole(value).clone() for name, value in found.items()}


def run(root: Path, layout: str, url: str | None, *, stop_at: int | None = None) -> tuple[int, dict[str, Tensor]]:
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


@pytest.mark.parametrize(
    "route",
    [["FSDP 2", "one"], pytest.param(["FSDP 4", "TP 2", "FSDP 2", "one"], marks=pytest.mark.slow)],
    ids=" - ".join,
)
def test_goes_on_at_another_layout_on_empty_machines(
    route: list[str], tmp_path: Path, moto: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{moto.make_bucket()}/runs"
    _, uninterrupted = run(tmp_path / "alone", "one", None)
    for place, layout in enumerate(route):
        stop_at = None if place == len(route) - 1 else place + 1
        begun, ended = run(tmp_path / str(place), layout, url, stop_at=stop_at)
        assert begun == place
    assert uninterrupted.keys() == ended.keys()
    assert max((value - ended[name]).abs().max().item() for name, value in uninterrupted.items()) < 1e-9


TENSORS = 2
ROWS = 512
COLUMNS = 8192
LAYOUT = RunLayout("family", "run")


def payload(step: int) -> dict[str, Any]:
    """Return sharded weights of 32 MiB over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weights = {}
    for number in range(TENSORS):
        generator = torch.Generator().manual_seed(number)
        tensor = torch.randn(ROWS, COLUMNS, generator=generator)
        weights[f"weight{number}"] = distribute_tensor(tensor, mesh, [Shard(0)])
    return {"format_version": 1, "model": weights, "state": {"step": step}}


def make_manager(directory: str, url: str) -> TorchDistributedCheckpointManager:
    manager = TorchDistributedCheckpointManager(
        directory,
        domain=world_of(torch.distributed.get_world_size(), torch.device("cpu")),
        run_id="run",
        settings=CheckpointSettings(async_mode="disabled"),
        step_mode=True,
    )
    sources = RemoteSources(Path(directory), run_id="run", connect=open_store, home=(url, LAYOUT))
    manager.checkpoints.look_in(lambda: sources, own=True)
    return manager


def save(directory: str, url: str) -> None:
    """Save on all ranks, each of which uploads its own files."""
    manager = make_manager(directory, url)
    RunMirror(open_store(url), LAYOUT, directory=Path(directory).parent, manager=manager, settings=MirrorSettings())
    manager.save_checkpoint(payload(1), epoch=0, global_step=1)
    manager.close()


def load(directory: str, url: str) -> None:
    """Load on all ranks, each of which reads its own share, and compare."""
    manager = make_manager(directory, url)
    source = manager.find_latest()
    assert source is not None
    expected = payload(1)
    template = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}}
    found = manager.load_checkpoint(source, template=template)
    for name, tensor in expected["model"].items():
        assert isinstance(found["model"][name], DTensor) and torch.equal(
            found["model"][name].to_local(), tensor.to_local()
        )
    assert found["state"]["step"] == 1
    manager.close()


def test_a_machine_moves_a_checkpoint_once_for_all_its_ranks(
    tmp_path: Path, moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{moto.make_bucket()}"
    run_processes(save, str(tmp_path / "first" / "checkpoints"), url, world_size=2, init_process_group=True)
    size = TENSORS * ROWS * COLUMNS * 4
    assert size < proxy.uploaded() < 1.05 * size
    for ranks in (1, 2, 4):
        proxy.forget()
        place = tmp_path / f"on {ranks}" / "checkpoints"
        run_processes(load, str(place), url, world_size=ranks, init_process_group=True)
        assert size <= proxy.downloaded() < 1.05 * size
        assert sum(file.stat().st_size for file in place.rglob("*.distcp")) >= size
