"""What `on_pass_start` sets in modules of model and criterion is there for the rest of a pass that is resumed."""

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
        return self.scale * (inputs.tanh() if self.kind == "tanh" else inputs.sin()) + getattr(self, "shift", 0.0)


class Scheduled(dl.Runner):
    stop_after: int | None = None
    not_saved = ("stop_after",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        drawn = torch.Generator().manual_seed(0)
        inputs = torch.randn(8 * UPDATES_OF_PASS, 4, generator=drawn)
        self.datasets = {"train": TensorDataset(inputs, torch.randint(3, (len(inputs),), generator=drawn))}
        self.model = nn.Sequential(nn.Linear(4, 8), Scaled(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()

    def on_pass_start(self, split: str) -> None:
        epoch = self.train_state.epoch
        model: Any = self.unwrapped_model
        model[1].scale, model[1].kind, model[1].shift = 1.0 + epoch, "sin" if epoch % 2 else "tanh", epoch / 4
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
        return weights, runner.unwrapped_model[1].seen


@pytest.mark.parametrize("backend", ["file", "dcp"])
@pytest.mark.parametrize("world_size", [1, 2])
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
        (1.0 + epoch, "sin" if epoch % 2 else "tanh") for epoch in range(EPOCHS) for _ in range(UPDATES_OF_PASS)
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
        }
        state["state"]["pass_settings"] = stored | {"model.1.seen": 3, "criterion.label_smoothing": 0.5}
        weight = runner.model[0].weight
        runner.load_state_dict(state)
        assert (runner.model[2].p, runner.criterion.label_smoothing) == (0.75, 0.5)
        assert callable(runner.model[2].forward) and runner.model[0].weight is weight
        assert runner.model[2].training and runner.model[1].seen == []
