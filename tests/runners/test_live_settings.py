"""What a program changes while it trains, and what it puts in the place of a part, is heeded at once and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.runners import RunnerState


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base = {"dir": str(root / "run"), "seed": 3, "log": False, "dataloader": {"batch_size": 4}}
    return {**base, "optim": {"type": "sgd", "lr": 0.1}, **more}


class Line(dl.Runner):
    """A linear model on 40 points: ten batches a pass."""

    not_saved = ("in_window", "windows")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inputs = torch.linspace(-1, 1, 120).view(40, 3)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.model = nn.Linear(3, 1)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": data, "val": data}
        self.windows: list[int] = []

    def train_step(self, data: Any) -> Any:
        self.in_window += 1
        return super().train_step(data)

    in_window = 0

    def step(self) -> Any:
        self.windows.append(self.in_window)
        self.in_window = 0
        return super().step()


@pytest.mark.parametrize(("before", "after"), [(50, 5), (3, 5), (8, 5)])
def test_a_budget_of_steps_that_changes_while_training(before: int, after: int, tmp_path: Path) -> None:
    class Changing(Line):
        def step(self) -> Any:
            if self.state.train.global_step == 2:
                self.config.steps = after
            return super().step()

    with Changing(settings(tmp_path, steps=before)) as runner:
        runner.train()
        assert runner.state.train.global_step == after
        assert list(runner.results)[-1] == after
        assert runner.read_checkpoint("latest")["state"]["train"]["global_step"] == after


def test_accumulation_that_changes_in_a_pass(tmp_path: Path) -> None:
    class Changing(Line):
        def step(self) -> Any:
            if self.state.train.global_step == 1:
                self.config.accum_steps = 4
            return super().step()

    with Changing(settings(tmp_path, epochs=1)) as runner:
        runner.train()
        assert runner.windows == [1, 1, 4, 4]


def test_accumulation_that_a_property_says(tmp_path: Path) -> None:
    class Accumulating(Line):
        @property
        def accum_steps(self) -> int:
            return 2

    with Accumulating(settings(tmp_path, epochs=1)) as runner:
        assert runner.steps == 5
        runner.train()
        assert runner.windows == [2, 2, 2, 2, 2]


def test_an_override_of_optimizer_step_steps_another_optimizer(tmp_path: Path) -> None:
    class Two(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.first = torch.optim.SGD([self.model.weight], lr=0.1)
            self.second = torch.optim.SGD([self.model.bias], lr=0.1)
            self.optimizer = self.first

        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.optimizer = self.second
            super().optimizer_step()
            self.optimizer = self.first

    with Two(settings(tmp_path, steps=1, optim={})) as runner:
        before = {name: value.clone() for name, value in runner.model.state_dict().items()}
        runner.train()
        assert all(not torch.equal(value, before[name]) for name, value in runner.model.state_dict().items())


@dataclass
class Noting(RunnerState):
    """State with an entry of its own."""

    noted: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "noted": self.noted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.noted = state.get("noted", 0)


def test_state_of_a_class_of_ones_own_comes_back(tmp_path: Path) -> None:
    class Kept(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.state = Noting(self.state.train, self.state.elastic, self.state.rng)

    with Kept(settings(tmp_path, steps=1)) as runner:
        runner.state.noted = 7
        runner.train()
    with Kept(settings(tmp_path, steps=2, auto_resume=True)) as runner:
        assert (runner.state.noted, runner.state.train.global_step) == (7, 1)


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_weights_that_an_override_adds_come_back(stack: str, tmp_path: Path) -> None:
    class Adding(Line):
        not_saved = ("table",)

        table = torch.zeros(3)

        def model_state_dict(self) -> dict[str, Any]:
            return {**super().model_state_dict(), "table": self.table}

        def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
            own = dict(state)
            self.table = own.pop("table")
            super().load_model(own, partial=partial)

    with Adding(settings(tmp_path, steps=1, stack=stack)) as runner:
        runner.table = torch.full((3,), 7.0)
        runner.train()
    with Adding(settings(tmp_path, steps=2, stack=stack, auto_resume=True)) as runner:
        assert runner.table.tolist() == [7.0, 7.0, 7.0]


def test_components_that_an_override_leaves_out_are_saved(tmp_path: Path) -> None:
    class Partly(Line):
        def component_states(self) -> dict[str, Any]:
            return {"model": self.model_state_dict(), "optimizer": self.optimizer_state_dict()}

    config = settings(tmp_path, ema={"enabled": True}, scheduler={"type": "cosine"})
    with Partly({**config, "steps": 1}) as runner:
        runner.train()
        assert {"model", "optimizer", "ema", "scheduler"} <= runner.read_checkpoint("latest").keys()
    with Partly({**config, "steps": 2, "auto_resume": True}) as runner:
        assert runner.state.train.global_step == 1


def test_a_checkpoint_that_was_asked_for_survives_a_boundary_by_hand(tmp_path: Path) -> None:
    saved: list[int] = []

    class Saving(Line):
        def save_checkpoint(self, **how: Any) -> None:
            saved.append(self.state.train.global_step)
            super().save_checkpoint(**how)

    with Saving(settings(tmp_path, epochs=3)) as runner:
        runner.request_checkpoint()
        assert not runner.boundary()
        runner.train_epoch()
        assert saved and saved[0] == 1
