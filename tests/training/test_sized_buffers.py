"""Buffers that the first forward gives a size, as observers of quantization do: trained, averaged, skipped and resumed."""

from __future__ import annotations

from collections.abc import Mapping
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

INPUTS = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64).reshape(24, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
UPDATES, STOP = 7, 4


class Ranges(nn.Module):
    """Divides by the running range of each channel. Its buffer is empty until it has seen a batch."""

    ranges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ranges", torch.tensor([], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = inputs.detach().abs().amax(0)
        if not self.ranges.numel():
            self.ranges.resize_(seen.shape).copy_(seen)
        elif self.training:
            self.ranges.lerp_(seen, 0.25)
        return inputs / (self.ranges + 0.1)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state[f"{prefix}ranges"]
        self.ranges.resize_(stored.shape).copy_(stored)
        super()._load_from_state_dict(state, prefix, *rest)


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8).double(), Ranges(), nn.Linear(8, 2).double())


class Observed(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        data = TensorDataset(INPUTS, TARGETS)
        self.model, self.criterion, self.datasets = (
            make(),
            nn.MSELoss(),
            {"train": data, "val": data},
        )


def train(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    with Observed(config) as runner:
        runner.train()
        averages = {} if runner.ema is None else dict(runner.ema.weights)
        return {name: value.clone() for name, value in runner.model_state_dict().items()}, averages


def by_hand(decay: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for update in range(UPDATES):
        batch = slice(8 * (update % 3), 8 * (update % 3) + 8)
        optimizer.zero_grad()
        functional.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            averages[name].lerp_(parameter.detach(), 1.0 - (decay or 0.0))
    # Buffers are copied, not averaged.
    return model.state_dict(), averages | dict(model.named_buffers())


@pytest.mark.parametrize(
    "more", [{}, {"ema": {"enabled": True, "decay": 0.8}}, {"skip_nonfinite_grad": True}]
)
def test_a_run_with_sized_buffers_is_that_by_hand_also_resumed(
    more: dict[str, Any], tmp_path: Path
) -> None:
    loader = {"batch_size": 8, "shuffle": False}
    expected = by_hand(more.get("ema", {}).get("decay"))
    common = {"dataloader": loader, "evaluate_interval": 2, **more}
    whole = train(settings(tmp_path / "whole", steps=UPDATES, **common))
    train(settings(tmp_path / "parts", steps=STOP, **common))
    resumed = train(settings(tmp_path / "parts", steps=UPDATES, auto_resume=True, **common))
    torch.testing.assert_close(whole[0], dict(expected[0]), rtol=0, atol=1e-12)
    if more.get("ema"):
        torch.testing.assert_close(whole[1], expected[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_sized_buffers_of_two_ranks_are_those_of_the_first(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=3, dataloader={"batch_size": 4, "shuffle": False})
    first, second = run_processes(train, config, world_size=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    resumed, _ = run_processes(train, {**config, "steps": 4, "auto_resume": True}, world_size=2)
    assert resumed[0]["1.ranges"].shape == (8,)
