"""A user's program as mypy sees it: what must be accepted, and, where a line is marked, what must be refused.

`make lint` checks it under `strict`, where a mark that ignores nothing is an error. It is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, assert_type

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import danling as dl
from danling.config.schema import AxesConfig, DataLoaderConfig, OptimConfig


class Settings(dl.RunnerConfig):
    width: int = 64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lineage = "mine"
        self.optim = {"type": "adamw", "lr": 3e-4}
        self.scheduler = {"type": "cosine"}
        self.model.width = 256
        self.dataloader.batch_size = 8


class Program(dl.Runner):
    def __init__(self, config: dl.RunnerConfig, data: Dataset[Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": data, "val": data}
        self.dataloaders = {"test": DataLoader(data, batch_size=4)}
        self.metrics = {"acc": dl.metrics.accuracy}

    def build_optimizer(self) -> Optimizer:
        return dl.OPTIMIZERS.build(self.model.parameters(), type="adamw", lr=1e-3)

    def train_step(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, target = data
        with self.train_context(), self.forward_context():
            pred = self.model(inputs)
            loss = self.criterion(pred, target)
        self.backward(loss)
        self.meters.update({"mine": loss.detach()}, len(inputs))
        return pred, loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "x": 1}


class WrongOverrides(Program):
    """What an override cannot be: it would not be called with what it asks for, or give what is asked of it."""

    def train_epoch(self, split: int) -> dict[str, float]:  # type: ignore[override]
        return {}

    def evaluate_step(self, data: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(())

    def load_model(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        pass


class OwnLoss(Program):
    def __init__(self, config: dl.RunnerConfig, data: Dataset[Any]) -> None:
        super().__init__(config, data)
        self.criterion = None


def write(config: dl.RunnerConfig) -> None:
    config.optim = {"type": "sgd", "lr": 0.1}
    config.optim = OptimConfig(type="sgd")
    config.parallel.axes = {"shard": 2}
    config.model = {"width": 3}
    config.model.depth = 2
    config.checkpoint.interval = 3
    config.epochs = "ten"  # type: ignore[assignment]
    config.optim = "adamw"  # type: ignore[assignment]
    config.checkpoint = 3  # type: ignore[assignment]
    config.checkpoint.intervall = 3  # type: ignore[assignment]
    config.optim.momentum = 0.9


def read(config: dl.RunnerConfig) -> None:
    assert_type(config.optim, OptimConfig)
    assert_type(config.optim.lr, float)
    assert_type(config.dataloader, DataLoaderConfig)
    assert_type(config.parallel.axes, AxesConfig)
    assert_type(config.epochs, int | None)


def use(config: Settings, data: Dataset[Any]) -> None:
    with Program(config, data) as runner:
        assert_type(runner, Program)
        assert_type(runner.mode, Literal["train", "evaluate", "infer"])
        assert_type(runner.infer("val"), list[Any])
        assert_type(runner.infer("val", stream=True), Iterator[Any])
        assert_type(runner.evaluate("val"), dict[str, dict[str, float]])
        assert_type(runner.unwrapped_model, nn.Module)
        assert_type(runner.best_score, float | None)
        runner.trian()  # type: ignore[attr-defined]
        runner.modle = 3  # type: ignore[attr-defined]
    assert_type(Program.from_checkpoint("x"), Program)
    assert_type(Program.from_pretrained({"epochs": 1}, "x"), Program)
    Program({"epochs": 1}, data)  # type: ignore[arg-type]
    print(dl.RunerConfig)  # type: ignore[attr-defined]
