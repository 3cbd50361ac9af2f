"""G4: any split of a batch over micro-batches and ranks gives the gradient of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import KeepsGradients
from torch import Tensor, nn

SPLITS = {1: [[12], [5, 4, 3], [1, 11]], 2: [[7, 5], [3, 2, 4, 3]], 3: [[6, 4, 2], [3, 1, 1, 2, 4, 1]]}
"""Sizes of the micro-batches by world size; they go round the ranks, and none divides evenly."""


def points() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(12, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (12, 3), generator=generator)
    # Ignored targets in very unequal shares, and one sample without a single one that counts.
    labels[torch.rand(12, 3, generator=generator) < 0.5] = -100
    labels[9] = -100
    return x, labels, torch.randn(12, 4, dtype=torch.float64, generator=generator)


def build() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12)).double()


def tokens_loss(criterion: nn.Module, pred: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = criterion(pred.reshape(len(pred), 4, 3), target)
    return loss


def criterion_of(kind: str) -> nn.Module:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    return {
        "plain": nn.CrossEntropyLoss(),
        "weighted": nn.CrossEntropyLoss(weight),
        "sum": nn.CrossEntropyLoss(reduction="sum"),
    }[kind]


class GradientRunner(KeepsGradients):
    def __init__(self, config: dict[str, Any], kind: str, batches: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config)
        self.model = build()
        self.criterion = criterion_of(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dataloaders = {"train": batches}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return tokens_loss(self.criterion, pred, target)


def one_update(root: str, kind: str, sizes: list[int], accum_steps: int) -> dict[str, Any]:
    import os

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    x, labels, _ = points()
    parts = list(zip(x.split(sizes), labels.split(sizes)))
    config = {"steps": 1, "seed": 0, "accum_steps": accum_steps, "workspace_root": root, "log": False}
    with GradientRunner(config, kind, parts[rank::world]) as runner:
        runner.train()
        return {
            "gradients": runner.gradients,
            "loss": runner.results[1]["train"]["loss"],
            "samples": runner.state.train.samples,
        }


@pytest.mark.parametrize("kind", ["plain", "weighted", "sum"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_split_gives_the_gradient_of_the_whole(world_size: int, kind: str, tmp_path: Path) -> None:
    x, labels, _ = points()
    model = build()
    loss = tokens_loss(criterion_of(kind), model(x), labels)
    loss.backward()
    for sizes in SPLITS[world_size]:
        accum = len(sizes) // world_size
        ranks = run_processes(one_update, str(tmp_path), kind, sizes, accum, world_size=world_size)
        for rank in ranks:
            assert rank["samples"] == 12
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(rank["gradients"][name], parameter.grad, rtol=1e-6, atol=1e-12)
            if kind != "sum":
                assert rank["loss"] == pytest.approx(loss.item(), rel=1e-9)
