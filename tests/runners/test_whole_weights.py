"""Whole weights on every stack: the same tensors to look at, and what rank 0 writes stays, through the next update too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Small(dl.Runner):
    """Two layers, and a learning rate of nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        self.datasets = {"train": TensorDataset(x, (x.sum(1) > 0).long())}
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.criterion = nn.CrossEntropyLoss()


def looked_at(root: str, stack: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    still = {"optim": {"type": "sgd", "lr": 0.0}, "checkpoint": {"load_only": True}}
    with Small(settings(root, steps=1, **still, **stack)) as runner:

        def copies() -> dict[str, Tensor]:
            with runner.whole_weights():
                return {name: p.detach().clone() for name, p in runner.unwrapped_model.named_parameters()}

        before = copies()
        with runner.whole_weights(modify=True), torch.no_grad():
            for parameter in runner.unwrapped_model.parameters():
                parameter.mul_(2.0 if runner.is_main_process else 7.0)
        written = copies()
        runner.train()
        return {"before": before, "written": written, "trained": copies()}


STACKS = [
    pytest.param({}, id="ddp"),
    pytest.param({"stack": "parallel", "parallel.axes.shard": 2}, id="fsdp"),
    pytest.param({"stack": "deepspeed", "deepspeed.zero_optimization.stage": 1}, id="zero1", marks=needs_deepspeed),
    pytest.param({"stack": "deepspeed", "deepspeed.zero_optimization.stage": 3}, id="zero3", marks=needs_deepspeed),
]


@pytest.mark.parametrize("stack", STACKS)
def test_whole_weights_are_seen_and_written(stack: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for rank in run_processes(looked_at, str(tmp_path), stack, world_size=2):
        for name, parameter in model.named_parameters():
            assert torch.equal(rank["before"][name], parameter.detach())
            assert torch.equal(rank["written"][name], 2 * parameter.detach())
            assert torch.equal(rank["trained"][name], 2 * parameter.detach())
