"""A criterion that learns from what it is given, such as the centres of classes, learns nothing from an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl

UPDATES = 6


def drawn(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=generator))


class Centres(nn.Module):
    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(3, 3, dtype=torch.float64))
        self.fixed = nn.Dropout(0.5).eval()

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        if self.training:
            for kind in target.unique():
                self.centres[kind].lerp_(pred[target == kind].detach().mean(0), 0.25)
        distances = (pred - self.centres[target]).square().mean()
        return functional.cross_entropy(self.fixed(pred), target) + 0.1 * distances


def make() -> tuple[nn.Module, Centres]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), Centres()


class Centred(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make()
        self.datasets = {"train": drawn(0, 24), "val": drawn(1, 10)}


@pytest.mark.parametrize("interval", [1, UPDATES])
def test_centres_follow_from_the_batches_to_train_on(interval: int, tmp_path: Path) -> None:
    model, criterion = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = drawn(0, 24).tensors
    for update in range(UPDATES):
        batch = torch.arange(8) + 8 * (update % 3)
        optimizer.zero_grad()
        criterion(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    loader = {"batch_size": 8, "shuffle": False}
    with Centred(
        settings(tmp_path, steps=UPDATES, evaluate_interval=interval, dataloader=loader)
    ) as runner:
        runner.train()
        inputs, targets = drawn(1, 10).tensors
        with torch.no_grad():
            expected = criterion.eval()(model(inputs), targets).item()
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(runner.criterion.centres, criterion.centres, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            dict(runner.model.state_dict()), dict(model.state_dict()), rtol=0, atol=1e-12
        )
        assert runner.criterion.training and not runner.criterion.fixed.training
