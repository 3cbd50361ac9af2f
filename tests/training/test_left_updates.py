"""A training that an exception has ended within an update, and that the program begins again with the same runner."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
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
from danling.training import NonFiniteError

INPUTS = torch.linspace(-1.0, 1.0, 128, dtype=torch.float64).reshape(32, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
UPDATES = 6
FAILS_AT = 5
"""The micro-batch, of two in an update, at whose end the program fails: the first one of the third update."""


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Failing(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), nn.MSELoss()
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if self.config.kind == "of a phase":
            self.optimizer = {"all": self.optimizer}
        self.left = [self.config.kind]

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        loss = functional.mse_loss(self.model(inputs), targets)
        fails = self.left and self.train_state.micro_step + 1 == FAILS_AT
        if fails and self.left[0] == "not finite":
            self.left.clear()
            loss = loss * float("nan")
        if self.config.kind == "of a phase":
            with self.optimizing("all"):
                self.backward(loss)
        else:
            self.backward(loss)
        if fails and self.left:
            self.left.clear()
            raise (
                KeyboardInterrupt
                if self.config.kind == "interrupted"
                else RuntimeError("a bad sample")
            )
        return None, loss

    def optimizer_step(self) -> None:
        fails = self.left and self.train_state.global_step == 2
        if fails and self.config.kind == "in the step":
            self.left.clear()
            raise RuntimeError("before the step")
        super().optimizer_step()
        if fails and self.config.kind == "after the step":
            self.left.clear()
            raise RuntimeError("after the step")


def train(config: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    with Failing(config) as runner:
        with pytest.raises((RuntimeError, NonFiniteError, KeyboardInterrupt)):
            runner.train()
        assert runner.train_state.global_step == 2 and not runner.left
        runner.train()
        return {
            name: value.clone() for name, value in runner.model_state_dict().items()
        }, runner.train_state.micro_step


class Half(Failing):
    """Fails in float16 where its gradients have been unscaled; the model is in single precision."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = make().float()
        self.datasets = {"train": TensorDataset(INPUTS.float(), TARGETS.float())}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if self.config.phased:
            self.optimizer = {"all": self.optimizer}

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        with self.optimizing("all") if self.config.phased else nullcontext():
            loss = self.compute_loss(self.model(inputs), targets)
            self.backward(loss)
        return None, loss


def train_half(config: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    with Half(config) as runner:
        if runner.config.kind == "in the step":
            with pytest.raises(RuntimeError, match="before the step"):
                runner.train()
            assert runner.train_state.global_step == 2
        runner.train()
        return {
            name: value.clone() for name, value in runner.model_state_dict().items()
        }, runner.train_state.micro_step


@pytest.mark.parametrize("phased", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_in_float16_that_was_left_after_unscaling_is_made_again(
    world_size: int, phased: bool, tmp_path: Path
) -> None:
    loader = {"batch_size": 4 // world_size, "shuffle": False}
    more = {
        "steps": UPDATES,
        "accum_steps": 2,
        "dataloader": loader,
        "precision": "fp16",
        "phased": phased,
    }
    whole = run_processes(
        train_half, settings(tmp_path / "whole", kind="none", **more), world_size=world_size
    )
    left = run_processes(
        train_half, settings(tmp_path / "left", kind="in the step", **more), world_size=world_size
    )
    for (weights, steps), (others, other_steps) in zip(whole, left):
        torch.testing.assert_close(weights, others, rtol=0, atol=0)
        assert steps == other_steps == 2 * UPDATES


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "kind", ["raised", "interrupted", "not finite", "in the step", "of a phase"]
)
def test_an_update_that_was_left_is_made_again_from_its_first_sample(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(UPDATES):
        batch = torch.arange(8 * update, 8 * update + 8) % 32
        optimizer.zero_grad()
        functional.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()
        optimizer.step()
    loader = {"batch_size": 4 // world_size, "shuffle": False}
    config = settings(tmp_path, steps=UPDATES, accum_steps=2, dataloader=loader, kind=kind)
    for found, micro_steps in run_processes(train, config, world_size=world_size):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-12)
        assert micro_steps == 2 * UPDATES


@pytest.mark.parametrize("kind", ["in the step", "after the step"])
@pytest.mark.parametrize("skips", [False, True])
def test_what_is_left_of_an_update_is_named(
    skips: bool, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Failing(settings(tmp_path, steps=4, kind=kind, skip_nonfinite_grad=skips)) as runner:
        with pytest.raises(RuntimeError, match="the step"):
            runner.train()
        runner.train()
    (line,) = (message for message in caplog.messages if "was left half-way" in message)
    assert ("is put back" in line) == skips
    assert ("the weights move a second time" in line) == (kind == "after the step")


class InBackward(Failing):
    """Fails in the last backward of an update, in which DistributedDataParallel reduces."""

    def backward(self, loss: Tensor) -> None:
        if self.train_state.micro_step == 3:
            model: Any = self.unwrapped_model
            model[0].weight.register_hook(self.fail)
        super().backward(loss)

    def fail(self, gradient: Tensor) -> None:
        raise RuntimeError("in the backward")


def train_again_after_backward(config: Mapping[str, Any]) -> str:
    with InBackward(config) as runner:
        with pytest.raises(RuntimeError, match="in the backward"):
            runner.train()
        with pytest.raises(RuntimeError) as error:
            runner.train()
        return str(error.value)


def test_a_reduction_that_was_left_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=4, accum_steps=2, kind="none")
    for message in run_processes(train_again_after_backward, config, world_size=2):
        assert "DistributedDataParallel reduces the gradients of update 2" in message


class Reads(dl.Runner):
    """Reads its state between the micro-batches of its updates, or between updates."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), nn.MSELoss()
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}

    def train_step(self, data: Any) -> Any:
        if self.config.within:
            self.state_dict()
        return super().train_step(data)

    def step(self) -> Any:
        outcome = super().step()
        self.save_checkpoint()
        return outcome


@pytest.mark.parametrize("within", [False, True])
def test_a_state_that_is_read_within_an_update_is_named_once(
    within: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Reads(settings(tmp_path, steps=2, accum_steps=2, within=within)) as runner:
        runner.train()
    lines = [message for message in caplog.messages if "was read within update 1" in message]
    assert len(lines) == within
