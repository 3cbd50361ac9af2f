"""Directories of `torch_checkpointing` 0.1.1, the format that TorchTitan moves to.

The fixture was written by that package on two processes: a model of two linear layers with FSDP2 (`fully_shard` over a mesh of two), by
`CheckpointManager.Config.with_sync_save()` with the item `model`. `metadata.pkl`, which the package writes for items with a resharder, is
that of one process. Other layouts are made here in the same way: `torch.save` of the `state_dict` of each rank, DTensors in it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from danling.checkpoints.exchange import import_weights
from danling.cli.main import main

FIXTURE = Path(__file__).with_name("fixtures") / "torch_checkpointing"
SHAPES = {"count": (), "0.weight": (5, 3), "0.bias": (5,), "1.weight": (2, 5), "1.bias": (2,)}
FULL = torch.arange(40.0).reshape(8, 5)
FIRST_ROWS = [-0.1043, -0.5245, 0.0886, 0.0526, -0.4510]


class Task(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        self.model.register_buffer("count", torch.tensor(0))
        self.criterion = nn.MSELoss()
        self.datasets = {"train": TensorDataset(torch.ones(4, 3), torch.ones(4, 2))}


def test_what_fsdp_has_divided_is_read_whole_for_pretrained_and_export(tmp_path: Path) -> None:
    weights = import_weights(FIXTURE)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == SHAPES
    assert weights["count"] == 7 and type(weights["0.weight"]) is torch.Tensor
    assert torch.allclose(weights["0.weight"][:, 0], torch.tensor(FIRST_ROWS), atol=1e-4)
    with Task.from_pretrained({"log": False, "dir": str(tmp_path / "run")}, FIXTURE) as runner:
        assert all(torch.equal(value, weights[name]) for name, value in runner.model.state_dict().items())
    assert main(["export", str(FIXTURE), str(tmp_path / "model.safetensors")]) == 0
    exported = import_weights(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], weights[name]) for name in SHAPES)


def write_rank(directory: str) -> None:
    """Write a directory of four ranks: uneven shares, copies, and FSDP over tensor parallel rows, which divides one dimension twice."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    linear = nn.Linear(5, 8, bias=False)
    linear.weight.data = FULL
    fully_shard(parallelize_module(linear, mesh["tensor"], ColwiseParallel()), mesh=mesh["fsdp"])
    layouts = {"both": [Shard(0), Shard(1)], "same": [Shard(0), Shard(0)], "copies": [Replicate(), Shard(1)]}
    state = {name: distribute_tensor(FULL, mesh, layout) for name, layout in layouts.items()}
    torch.save({**state, **linear.state_dict(), "plain": FULL}, Path(directory) / f"model_{dist.get_rank()}.pt")


def test_any_mesh_is_put_together_and_no_share_may_be_missing(tmp_path: Path) -> None:
    run_processes(write_rank, str(tmp_path), world_size=4)
    weights = import_weights(tmp_path)
    assert weights.keys() == {"both", "same", "copies", "weight", "plain"}
    for name, tensor in weights.items():
        assert torch.equal(tensor, FULL), name
    (tmp_path / "model_2.pt").unlink()
    with pytest.raises(CheckpointDamaged, match="Expected every share of both"):
        import_weights(tmp_path)


@pytest.mark.parametrize("harm", ["flipped", "another", "metadata", "none", "code"])
def test_what_cannot_be_verified_is_refused_by_name(harm: str, tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    shutil.copytree(FIXTURE, directory)
    file = directory / "model_1.pt"
    if harm == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif harm == "another":  # a share that tensor parallelism without DTensors has left
        for rank in range(2):
            torch.save({"weight": torch.full((2,), float(rank))}, directory / f"model_{rank}.pt")
    elif harm == "code":
        torch.save({"weight": nn.Linear(1, 1)}, file)
    else:
        for rank in range(2):
            (directory / f"model_{rank}.pt").unlink()
        if harm == "none":
            (directory / "metadata.pkl").unlink()
            torch.save({}, directory / "step_0.pt")
    messages = {
        "another": "weight in .* differs between ranks",
        "metadata": "a directory of torch_checkpointing without such files",
        "none": "Expected weights",
    }
    with pytest.raises(CheckpointError, match=messages.get(harm, "model_1.pt")):
        import_weights(directory)


def test_other_uses_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointMismatch, match="a directory of torch_checkpointing"):
        dl.Runner.read_config(FIXTURE)
    assert main(["verify", str(FIXTURE)]) != 0
    assert main(["export", str(FIXTURE), str(tmp_path / "out"), "--format", "hf"]) != 0
    assert capsys.readouterr().err.count("a directory of torch_checkpointing") == 2
