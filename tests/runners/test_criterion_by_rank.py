"""Criteria that ranks have built with values of their own, by a seed of the rank: all begin with that of the first one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)


class Calibrated(nn.Module):
    """Weighs the outputs by what it has drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.register_buffer("scale", torch.rand(2, generator=draw) + 0.5)
        self.shift = nn.Parameter(torch.rand(2, generator=draw), requires_grad=False)
        self.scale: Tensor

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return ((pred - target - self.shift).square() * self.scale).mean()


def make() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


class ByRank(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), Calibrated(self.rank)
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def train(config: Mapping[str, Any]) -> Tensor:
    with ByRank(config) as runner:
        runner.train()
        weight: Any = whole(runner.model_state_dict()["weight"].detach())
        copied: Tensor = weight.clone()
        return copied


STACKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "canonical": {
        "gradient_sum": "canonical",
        "dataloader": {"global_batch_size": 4, "micro_batch_size": 1},
    },
    "accelerate": {"stack": "accelerate"},
    "deepspeed": {"stack": "deepspeed"},
    "shard": {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
}


@pytest.mark.parametrize("stack", STACKS)
def test_all_ranks_begin_with_the_criterion_of_the_first(stack: str, tmp_path: Path) -> None:
    model, criterion = make(), Calibrated(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(torch.split(INPUTS, 4), torch.split(TARGETS, 4)):
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    config = {"epochs": 1, "dataloader": {"batch_size": 2}, **STACKS[stack]}
    config["dataloader"] = {**config["dataloader"], "shuffle": False}
    for weight in run_processes(train, settings(tmp_path, **config), world_size=2):
        torch.testing.assert_close(weight, model.weight.detach(), rtol=0, atol=1e-6)
