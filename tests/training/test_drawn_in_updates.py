"""Noise that a program adds to the gradient, in `step` or `clip_gradients`, is the same on ranks that hold copies of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn

import danling as dl

POINTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Noisy(dl.Runner):
    not_saved = ("drawn",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(3, 1).double(), nn.MSELoss()
        nn.init.zeros_(self.model.weight), nn.init.zeros_(self.model.bias)
        self.datasets = {"train": [(point, point.sum(0, keepdim=True)) for point in POINTS]}
        self.drawn: list[Tensor] = []

    def add_noise(self) -> None:
        for parameter in self.model.parameters():
            self.drawn.append(torch.randn_like(parameter))
            parameter.grad.add_(self.drawn[-1])

    def step(self) -> dl.training.UpdateOutcome:
        self.add_noise()
        return super().step()

    def clip_gradients(self, grad_norm: Tensor) -> None:
        super().clip_gradients(grad_norm)
        self.add_noise()


def train(config: Mapping[str, Any], by_hand: bool) -> tuple[list[Tensor], list[Tensor]]:
    with Noisy(config) as runner:
        if by_hand:
            for batch in list(runner.dataloaders["train"]):
                runner.train_step(batch)
                runner.step()
        else:
            runner.train()
        return [each.detach().clone() for each in runner.unwrapped_model.parameters()], runner.drawn


@pytest.mark.parametrize("by_hand", [False, True])
def test_ranks_add_the_same_noise(tmp_path: Path, by_hand: bool) -> None:
    loader = {"batch_size": None, "global_batch_size": 4, "shuffle": False}
    if by_hand:
        loader = {"batch_size": 2, "shuffle": False}
    config = settings(
        tmp_path, steps=6, dataloader=loader, optim={"type": "sgd", "lr": 0.1}, seed=1
    )
    (weights, drawn), (others, others_drawn) = run_processes(train, config, by_hand, world_size=2)
    model = nn.Linear(3, 1).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = iter(drawn)
    for update in range(6):
        points = POINTS[4 * update : 4 * update + 4]
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(model(points), points.sum(1, keepdim=True))
        loss.backward()
        for parameter in [*model.parameters()] * 2:
            assert parameter.grad is not None
            parameter.grad.add_(next(left))
        optimizer.step()
    assert len(drawn) == len({float(each.flatten()[0]) for each in drawn}) == 24
    for ours, theirs in zip(drawn + weights, others_drawn + others, strict=True):
        assert torch.equal(ours, theirs)
    for ours, right in zip(weights, model.parameters(), strict=True):
        assert torch.allclose(ours, right, rtol=0, atol=1e-12)


class Several(Noisy):
    """Two optimizers, one for each layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)).double()
        self.optimizer = {
            name: torch.optim.SGD(layer.parameters(), lr=0.1)
            for name, layer in zip("ab", self.model)
        }

    def train_step(self, data: tuple[Tensor, Tensor]) -> Any:
        for name in "ab":
            with self.optimizing(name):
                self.backward(nn.functional.mse_loss(self.model(data[0]), data[1]))
        return None, None

    def step(self) -> dl.training.UpdateOutcome:
        return super(Noisy, self).step()

    def add_noise(self) -> None:
        self.drawn.append(torch.randn(4))


def draws_of_several(config: Mapping[str, Any]) -> list[Tensor]:
    with Several(config) as runner:
        runner.train()
        return runner.drawn


def test_each_of_several_optimizers_has_noise_of_its_own(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=3, dataloader={"batch_size": 2}, optim={})
    drawn, others = run_processes(draws_of_several, config, world_size=2)
    assert len(drawn) == len({float(each[0]) for each in drawn}) == 6
    assert all(map(torch.equal, drawn, others))
