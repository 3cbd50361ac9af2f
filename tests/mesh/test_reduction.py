"""The gradient of a model on a mesh, without a runner: beside one process with all samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from support.processes import run_processes
from torch import Tensor, nn

from danling.mesh import Topology
from danling.mesh.fsdp import shard
from danling.mesh.reduction import MeshReduction
from danling.utils.tensors import whole


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(rank: int, part: int) -> Tensor:
    return torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(10 * part + rank))


def updated(axis: str) -> tuple[float, list[Tensor]]:
    """Make one update of two micro-batches a rank, clipped; return the norm and the weights."""
    topology, net = Topology({axis: 2}), model()
    if axis == "shard":
        mesh = topology.mesh("shard")
        assert mesh is not None
        shard(net, mesh, [])
    runner: Any = SimpleNamespace(
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        named_parameters=net.named_parameters,
        precision=SimpleNamespace(scaler=None),
        topology=topology,
        model=net,
        pipeline=None,
        config=SimpleNamespace(fsdp=SimpleNamespace(gradient_sync="last")),
    )
    reduction = MeshReduction(runner)
    for part in (0, 1):
        with reduction.context(last=part == 1):
            reduction.backward(net(batch(topology.rank("shard", "replicate"), part)).square().sum(), last=part == 1)
    reduction.complete()
    assert reduction.mean_over == 1
    norm = reduction.norm(reduction.unscale(1 / 14, 14.0))
    reduction.clip(norm, 0.05, None)
    reduction.apply()
    reduction.zero()
    assert all(parameter.grad is None for parameter in net.parameters())
    return norm.item(), [whole(parameter).detach().clone() for parameter in net.parameters()]


def both() -> dict[str, tuple[float, list[Tensor]]]:
    return {axis: updated(axis) for axis in ("replicate", "shard")}


def test_an_update_on_a_mesh_is_that_of_one_process() -> None:
    net = model()
    for rank in (0, 1):
        for part in (0, 1):
            (net(batch(rank, part)).square().sum() / 14).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    for found in run_processes(both, world_size=2, init_process_group=True):
        for measured, weights in found.values():
            torch.testing.assert_close(measured, norm.item())
            for mine, expected in zip(weights, net.parameters(), strict=True):
                torch.testing.assert_close(mine, expected.detach())
