"""Evaluations in which no target counts, and targets of types that torch only stores."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

SAMPLES = 16


class Ignoring(dl.TorchRunner):
    """The first half of the validation split has no label."""

    not_saved = ("stop_at",)

    def __init__(self, config: dict[str, Any], stop_at: int | None = None) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        inputs, labels = torch.randn(SAMPLES, 2, generator=generator), torch.arange(SAMPLES) % 3
        self.model = nn.Linear(2, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ignored = torch.where(torch.arange(SAMPLES) < SAMPLES // 2, -100, labels)
        self.datasets = {
            "train": TensorDataset(inputs, labels),
            "val": TensorDataset(inputs, ignored),
        }
        self.metrics = {"accuracy": dl.metrics.accuracy}
        self.stop_at = stop_at

    def train_step(self, data: Any) -> Any:
        if self.state.train.global_step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(data)

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        result = super().summarize(split, totals)
        return {**result, "perplexity": math.exp(result["loss"])}


class Ignoring100(Ignoring):
    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        return super().evaluate_steps(split, SAMPLES)


def train(root: Path, kind: Any = Ignoring, stop_at: int | None = None, **changes: Any) -> Any:
    config = {
        "seed": 1,
        "steps": 6,
        "evaluate_interval": 2,
        "dir": str(root),
        "log": False,
        "auto_resume": True,
    }
    data = {"batch_size": 4, "shuffle": False}
    with kind({**config, "dataloader": data, **changes}, stop_at) as runner:
        with suppress(SystemExit):
            runner.train()
        return {index: result["val"] for index, result in runner.results.items() if "val" in result}


@pytest.mark.parametrize(
    ("score", "world_size"),
    [
        ("loss", 1),
        ("accuracy", 1),
        ("perplexity", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("perplexity", 1), ("loss", 2), ("accuracy", 2))
        ),
    ],
)
def test_evaluation_with_ignored_targets_only_is_nan_and_training_continues(
    tmp_path: Path, score: str, world_size: int
) -> None:
    changes = {"score_name": score, "score_mode": "min"}
    run_processes(train, tmp_path, Ignoring, 4, world_size=world_size, **changes)
    results = run_processes(train, tmp_path, world_size=world_size, **changes)
    for found in results:
        assert list(found) == [2, 4, 6]
        for figures in found.values():
            assert all(math.isnan(figures[name]) for name in ("loss", "accuracy", "perplexity"))
            assert figures["samples"] == 4 * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_targets_leave_the_loss_of_the_others(tmp_path: Path, world_size: int) -> None:
    whole = run_processes(train, tmp_path / "whole", Ignoring100, world_size=world_size)
    for found in whole:
        assert all(math.isfinite(figures["loss"]) for figures in found.values())


def test_it_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    named = [
        line for line in caplog.messages if "No evaluated target of split 'val' counts" in line
    ]
    assert len(named) == 1 and "Its first 1 batches were evaluated" in named[0]


class Cast(Ignoring):
    """Stores labels in few bytes, and casts them in the criterion."""

    dtype = torch.uint16

    def __init__(self, config: dict[str, Any], stop_at: int | None = None) -> None:
        super().__init__(config, stop_at)
        ignored = 250
        loss = nn.CrossEntropyLoss(ignore_index=ignored, weight=torch.tensor([1.0, 2.0, 4.0]))

        class Criterion(nn.Module):
            ignore_index, weight = ignored, loss.weight

            def forward(self, pred: torch.Tensor, target: torch.Tensor) -> Any:
                return loss(pred, target.long())

        self.criterion = Criterion()
        self.metrics = {"accuracy": lambda pred, target: dl.metrics.accuracy(pred, target, ignored)}
        inputs, labels = self.datasets["train"].tensors
        labels = torch.where(torch.arange(SAMPLES) % 4 == 3, ignored, labels).to(self.dtype)
        self.datasets = {name: TensorDataset(inputs, labels) for name in ("train", "val")}


def train_cast(root: Path, dtype: torch.dtype) -> Any:
    class Typed(Cast):
        pass

    Typed.dtype = dtype
    return train(root, Typed, accum_steps=2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_targets_are_weighed_as_signed_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = train_cast(tmp_path / "signed", torch.int64)
    assert list(expected) == [2, 4, 6] and train_cast(tmp_path / "unsigned", dtype) == expected


def test_unsigned_targets_are_weighed_as_signed_ones_on_two_ranks(tmp_path: Path) -> None:
    expected, found = (
        run_processes(train_cast, tmp_path / str(dtype), dtype, world_size=2)
        for dtype in (torch.int64, torch.uint16)
    )
    assert found == expected
