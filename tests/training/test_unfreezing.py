"""Layers that `on_pass_start` freezes and unfreezes are trained from that pass on, as in a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(16, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
UNFROZEN, FROZEN = 1, 2
"""The passes in which the first layer is trained, and from which on it is not."""
SWITCHES: dict[str, Callable[[Any, int], object]] = {
    "one layer": lambda model, epoch: model[0].requires_grad_(UNFROZEN <= epoch < FROZEN),
    # As many tensors in each pass.
    "in turn": lambda model, epoch: (
        model[0].requires_grad_(epoch % 2 == 0),
        model[2].requires_grad_(epoch % 2 == 1),
    ),
}
"""What is trained in a pass."""


def make() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model[0].requires_grad_(False)
    return model


class Unfreezing(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}

    def on_pass_start(self, split: str) -> None:
        SWITCHES[self.config.switch](self.unwrapped_model, self.train_state.epoch)


def train(config: Mapping[str, Any]) -> dict[str, Tensor]:
    with Unfreezing(config) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_unfrozen_when_a_pass_starts_are_trained_in_it(
    world_size: int, switch: str, tmp_path: Path
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        SWITCHES[switch](model, epoch)
        for batch in torch.arange(16).split(8):
            optimizer.zero_grad()
            functional.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()
            optimizer.step()
    loader = {"batch_size": 8 // world_size, "shuffle": False}
    config = settings(tmp_path, epochs=3, dataloader=loader, switch=switch)
    for weights in run_processes(train, config, world_size=world_size):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
