"""What `on_pass_start` sets in modules of model and criterion is there for the rest of a pass that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl

UPDATES_OF_PASS = 4
EPOCHS = 3


class Scaled(nn.Module):
    """Has plain attributes of its own; one is set by the hook alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.kind = "tanh"
        self.seen: list[tuple[float, str]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append((self.scale, self.kind))
        return self.scale * (inputs.tanh() if self.kind == "tanh" else inputs.sin()) + getattr(
            self, "shift", 0.0
        )


class Scheduled(dl.Runner):
    stop_after: int | None = None
    not_saved = ("stop_after",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        drawn = torch.Generator().manual_seed(0)
        inputs = torch.randn(8 * UPDATES_OF_PASS, 4, generator=drawn)
        self.datasets = {
            "train": TensorDataset(inputs, torch.randint(3, (len(inputs),), generator=drawn))
        }
        self.model = nn.Sequential(nn.Linear(4, 8), Scaled(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()

    def on_pass_start(self, split: str) -> None:
        epoch = self.train_state.epoch
        model: Any = self.unwrapped_model
        model[1].scale, model[1].kind, model[1].shift = (
            1.0 + epoch,
            "sin" if epoch % 2 else "tanh",
            epoch / 4,
        )
        model[2].p = 0.2 * epoch
        self.criterion.label_smoothing = 0.1 * epoch

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == self.stop_after:
            self.stop()
        return outcome


def train(
    config: Mapping[str, Any], stop_after: int | None = None
) -> tuple[dict[str, Tensor], list[tuple[float, str]]]:
    with Scheduled(config) as runner:
        runner.stop_after = stop_after
        runner.train()
        weights = {name: value.clone() for name, value in runner.model_state_dict().items()}
        model: Any = runner.unwrapped_model
        return weights, model[1].seen


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (1, "file"),
        (2, "dcp"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "dcp"), (2, "file"))),
    ],
)
def test_rest_of_a_resumed_pass_has_the_settings_of_its_beginning(
    world_size: int, backend: str, tmp_path: Path
) -> None:
    loader = {"batch_size": 8 // world_size}
    more = {"epochs": EPOCHS, "dataloader": loader, "checkpoint": {"backend": backend}}
    whole = run_processes(train, settings(tmp_path / "whole", **more), world_size=world_size)
    parts: list[tuple[float, str]] = []
    for stop in (UPDATES_OF_PASS, 2 * UPDATES_OF_PASS + 1, None):
        config = settings(tmp_path / "parts", auto_resume=True, **more)
        found = run_processes(train, config, stop, world_size=world_size)
        parts += found[0][1]
    expected = [
        (1.0 + epoch, "sin" if epoch % 2 else "tanh")
        for epoch in range(EPOCHS)
        for _ in range(UPDATES_OF_PASS)
    ]
    assert whole[0][1] == parts == expected
    for (weights, _), (others, _) in zip(whole, found):
        torch.testing.assert_close(weights, others, rtol=0, atol=0)


def test_a_checkpoint_replaces_no_method_and_no_tensor(tmp_path: Path) -> None:
    with Scheduled(settings(tmp_path, epochs=1)) as runner:
        state = runner.state_dict()
        stored = {
            "model.2.p": 0.75,
            "model.2.forward": 1,
            "model.0.weight": 2.0,
            "model.2.training": False,
            "model.9.p": 0.5,
            "criterion.label_smoothing": 0.5,
        }
        state["state"]["pass_settings"] = {name: {"value": value} for name, value in stored.items()}
        weight = runner.model[0].weight
        runner.load_state_dict(state)
        assert (runner.model[2].p, runner.criterion.label_smoothing) == (0.75, 0.5)
        assert callable(runner.model[2].forward) and runner.model[0].weight is weight
        assert runner.model[2].training


class Kind(Enum):
    ADDED = "added"
    LEFT_OUT = "left out"


class Values(nn.Module):
    """Has a value of each kind that is saved, all of which change what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.of_numpy: Any = 1.0
        self.sizes = (1, 1)
        self.kind = Kind.LEFT_OUT
        self.offset = torch.zeros(1)
        self.factors = [1.0]
        self.by_name: dict[str, Any] = {"scale": 1.0}
        self.of_rank = 1.0

    def factor(self) -> float:
        total = (
            float(self.of_numpy)
            + 2 * self.sizes[0]
            + 4 * (self.kind is Kind.ADDED)
            + 8 * self.offset.item()
        )
        return total + 16 * self.factors[0] + 32 * float(self.by_name["scale"]) + 64 * self.of_rank

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor() * inputs


class SetsValues(Scheduled):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 3), Values())
        self.factors: list[float] = []

    def on_pass_start(self, split: str) -> None:
        epoch, rank = self.train_state.epoch, self.rank
        model: Any = self.unwrapped_model
        values = model[1]
        values.of_numpy = numpy.linspace(1.0, 2.0, EPOCHS)[epoch]
        values.sizes = (1 + epoch, 1)
        values.kind = Kind.ADDED if epoch else Kind.LEFT_OUT
        values.offset = torch.full((1,), float(epoch))
        values.factors[0] = 1.0 + epoch
        values.by_name["scale"] = numpy.float32(1.0 + epoch)
        # In the first pass, that of rank 0 is the value of __init__.
        values.of_rank = 1.0 + epoch + rank
        if epoch:
            self.criterion.weight = torch.tensor([1.0, 2.0, 3.0 + epoch])

    def train_step(self, data: Any) -> Any:
        model: Any = self.unwrapped_model
        weight: Any = self.criterion.weight
        self.factors.append(model[1].factor() + (0.0 if weight is None else 256 * weight[2].item()))
        return super().train_step(data)


def train_values(
    config: Mapping[str, Any], stop_after: int | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    with SetsValues(config) as runner:
        runner.stop_after = stop_after
        runner.train()
        return {
            name: value.clone() for name, value in runner.model_state_dict().items()
        }, runner.factors


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_all_kinds_are_there_on_each_rank(world_size: int, tmp_path: Path) -> None:
    more = {
        "epochs": EPOCHS,
        "dataloader": {"batch_size": 8 // world_size},
        "optim": {"type": "sgd", "lr": 1e-4},
    }
    whole = run_processes(train_values, settings(tmp_path / "whole", **more), world_size=world_size)
    for stop in (1, UPDATES_OF_PASS + 2, 2 * UPDATES_OF_PASS + 1, None):
        config = settings(tmp_path / "parts", auto_resume=True, **more)
        parts = run_processes(train_values, config, stop, world_size=world_size)
    for rank in range(world_size):
        expected = []
        for epoch in range(EPOCHS):
            factor = 1 + epoch / (EPOCHS - 1) + 2 * (1 + epoch) + 4 * (epoch > 0) + 8 * epoch
            factor += (16 + 32) * (1 + epoch) + 64 * (1 + epoch + rank)
            expected += [factor + 256 * (3 + epoch) * (epoch > 0)] * UPDATES_OF_PASS
        assert whole[rank][1] == expected
        assert parts[rank][1] == expected
        torch.testing.assert_close(parts[rank][0], whole[rank][0], rtol=0, atol=0)
