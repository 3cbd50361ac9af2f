"""What a runner keeps beside its components, training changes, and no checkpoint has is named; nothing else is."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import danling as dl
from danling.training.unsaved import UnsavedParts


def follow(module: nn.Module) -> None:
    """As many write it: past the counters of versions."""
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9 + 0.1


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_modules_optimizers_and_schedules_that_change_are_named() -> None:
    model, teacher, head = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 2)
    norm = nn.BatchNorm1d(2)
    optimizer = Adam(head.parameters())
    held: dict[str, Any] = {
        "teacher": teacher,
        "frozen": copy.deepcopy(teacher),
        "heads": [nn.Identity(), head],
        "norms": {"first": norm},
        "second": optimizer,
        "unused": SGD(teacher.parameters(), lr=0.1, momentum=0.9),
        "schedule": LinearLR(optimizer),
        "numbers": [1, 2],
        "backbone": model,
        "meta": nn.Linear(2, 2, device="meta"),
    }
    parts = UnsavedParts(lambda: held, lambda: (model, None))
    assert parts.changed() == []
    parts.begin()
    assert parts.changed() == []
    follow(teacher)
    follow(model)
    norm(torch.randn(4, 2))
    step(optimizer)
    held["schedule"].step()
    held["late"] = nn.Linear(1, 1)
    assert parts.changed() == ["teacher", "heads", "norms", "second", "schedule"]
    parts.begin()
    assert parts.changed() == []


def test_what_is_saved_with_a_component_is_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first, second = Adam(model[0].parameters()), SGD(model[1].parameters(), lr=0.1)
    joint = dl.optim.JointOptimizer(first, second)
    warmup, rest = LinearLR(first), ConstantLR(first)
    scheduler = SequentialLR(first, [warmup, rest], [2])
    held = {"backbone": model[0], "all": [model], "first": first, "both": [first, second], "warmup": warmup}
    parts = UnsavedParts(lambda: held, lambda: (model, joint, scheduler))
    parts.begin()
    model(torch.randn(4, 3))
    step(first), step(second), scheduler.step()
    assert parts.changed() == []


def test_averages_of_ones_own_by_the_names_of_the_parameters_are_named() -> None:
    model = nn.Linear(3, 2)
    held = {
        "shadow": {name: p.detach().clone() for name, p in model.named_parameters()},
        "sums": {"loss": torch.zeros(())},
    }
    parts = UnsavedParts(lambda: held, lambda: (model,))
    parts.begin()
    held["sums"]["loss"] += 1
    held["shadow"]["weight"] = held["shadow"]["weight"] * 0.5
    assert parts.changed() == ["shadow"]


def test_what_cannot_be_added_up_or_is_cast_or_moved_is_left_out() -> None:
    quantized = nn.Module()
    quantized.register_buffer("q", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))
    cast, grown = nn.Linear(3, 2), nn.Sequential(nn.LazyLinear(2))
    held = {"quantized": quantized, "cast": cast, "grown": grown, "late": SGD(cast.parameters(), lr=0.1)}
    parts = UnsavedParts(lambda: held, lambda: (None,))
    parts.begin()
    cast.half()
    grown(torch.ones(1, 3))
    assert parts.changed() == []


def test_of_a_large_tensor_elements_out_of_all_of_it_are_looked_at() -> None:
    queue = nn.Module()
    queue.register_buffer("rows", torch.zeros(1000, 1000))
    parts = UnsavedParts(lambda: {"queue": queue}, lambda: ())
    parts.begin()
    queue.rows[700:732] = 1.0
    assert parts.changed() == ["queue"]


class Student(dl.Runner):
    """A model, and a teacher that follows it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))}
        self.backbone = self.model[0]
        self.teacher = AveragedModel(self.model)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.teacher.update_parameters(self.unwrapped_model)


class SavedStudent(Student):
    """One that saves it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.teacher.load_state_dict(state["teacher"])


def test_a_teacher_is_named_once_and_comes_back_where_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(kind: type[Student], name: str, **more: Any) -> Student:
        config = {"seed": 1, "steps": 6, "optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 4}}
        with kind(config | {"dir": str(tmp_path / name), "checkpoint": {"interval": 2}} | more) as runner:
            runner.train()
        return runner

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "saved nowhere" in record.getMessage()]

    with caplog.at_level(logging.WARNING, logger="danling"):
        train(Student, "plain")
        (warning,) = said()
        assert "Received: self.teacher, changed since" in warning and "backbone" not in warning
        whole = train(SavedStudent, "whole")
        train(SavedStudent, "parts", steps=3)
        parts = train(SavedStudent, "parts", auto_resume=True)
        assert len(said()) == 1
    first, second = whole.teacher.state_dict(), parts.teacher.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
