"""Observers: told of each event in order; one that fails is dropped, one that is critical ends the training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling import TorchRunner
from danling.training.observers import Observer


class Program(TorchRunner):
    def __init__(self, directory: Path) -> None:
        super().__init__({"steps": 2, "accum_steps": 2, "dir": directory, "log": False, "optim.type": "sgd", "seed": 1})
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()
        self.datasets = {"train": [(torch.ones(2), torch.ones(1))] * 8}


class Recording(Observer):
    def __init__(self, name: str, seen: list[Any], runner: TorchRunner) -> None:
        self.name, self.seen, self.runner = name, seen, runner

    def training_started(self) -> None:
        self.seen.append((self.name, "training"))

    def micro_batch_started(self, data: object, *, first: bool) -> None:
        self.seen.append((self.name, "first" if first else "next"))

    def gradients_ready(self, totals: object, norm: Tensor) -> None:
        grads = [p.grad for p in self.runner.unwrapped_model.parameters() if p.grad is not None]
        assert torch.allclose(norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])))
        self.seen.append((self.name, "gradients"))

    def update_ended(self, outcome: Any) -> None:
        self.seen.append((self.name, self.runner.state.train.global_step))


class Failing(Observer):
    def update_ended(self, outcome: Any) -> None:
        raise OSError("no space left")


class Critical(Failing):
    critical = True


def test_events_come_in_the_order_of_the_list(tmp_path: Path) -> None:
    seen: list[Any] = []
    with Program(tmp_path) as runner:
        runner.observers.extend([Recording("a", seen, runner), Recording("b", seen, runner)])
        runner.train()
    events = ["training", "first", "next", "gradients", 1, "first", "next", "gradients", 2]
    assert seen == [(name, event) for event in events for name in ("a", "b")]


def test_one_that_fails_is_logged_once_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "danling")
    with Program(tmp_path) as runner:
        runner.observers.append(Failing())
        runner.train()
        assert runner.state.train.global_step == 2 and not runner.observers
    assert caplog.text.count("The observer Failing failed and is dropped") == 1


def test_one_that_is_critical_ends_the_training(tmp_path: Path) -> None:
    with Program(tmp_path) as runner:
        runner.observers.append(Critical())
        with pytest.raises(OSError, match="no space left"):
            runner.train()
        assert runner.state.train.global_step == 1
