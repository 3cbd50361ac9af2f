"""Small models, data and runners that several tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import danling as dl
from danling.utils.tensors import whole


class NoisyPoints(Dataset[dict[str, Any]]):
    """Points with augmentation that draws from torch, numpy and `random`."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(length, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy

        noise = 0.1 * torch.randn(6) + 0.1 * float(numpy.random.rand()) + 0.1 * random.random()
        target = self.points[index, :3].argmax()
        return {"input": self.points[index] + noise, "target": target, "index": index}


class Small(dl.TorchRunner):
    """A linear model on eight points."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.datasets = {
            "train": TensorDataset(torch.arange(32.0).reshape(8, 4), torch.arange(8) % 2)
        }
        self.model, self.criterion = nn.Linear(4, 2), nn.CrossEntropyLoss()


def settings(root: Path | str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a small run in a directory; `more` replaces keys and adds some."""
    base = {"dir": str(root), "seed": 1, "log": False, "dataloader": {"batch_size": 4}}
    return {**base, "optim": {"type": "sgd", "lr": 0.1}, **more}


def whole_settings(root: Path | str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a run below a directory in which everything moves: windows, averages, moments and a schedule."""
    base: dict[str, Any] = {
        "workspace_root": str(root),
        "seed": 3,
        "accum_steps": 2,
        "log_interval": 1000,
    }
    base |= {
        "dataloader": {"batch_size": 2, "drop_last": False},
        "ema": {"enabled": True, "decay": 0.9},
    }
    return {**base, "optim": {"type": "adamw", "lr": 1e-2}, "scheduler": {"type": "cosine"}, **more}


def in_parts(
    make: Callable[[dict[str, Any]], Any], root: Path, stops: Sequence[int], **more: Any
) -> tuple[Any, Any]:
    """Train a run that is left alone, and one that is resumed after each of some updates; return both, closed."""
    runners = []
    for name, ends in (("whole", stops[-1:]), ("parts", stops)):
        for steps in ends:
            with make(settings(root / name, steps=steps, auto_resume=True, **more)) as runner:
                runner.train()
        runners.append(runner)
    return runners[0], runners[1]


def line_of(length: int) -> TensorDataset:
    """Return points with their sums as targets."""
    inputs = torch.randn(length, 3, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Line(dl.Runner):
    """A linear model of sums, on any stack: four batches of four a pass."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": line_of(16), "val": line_of(6)}


class Chain(Line):
    """A model of sums that every stack can take: three batches of four a pass."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.datasets = {"train": line_of(12), "val": line_of(12)}


class KeepsGradients(dl.Runner):
    """Keeps the gradients of its last update, whole."""

    not_saved = ("gradients",)
    gradients: dict[str, Tensor]

    def optimizer_step(self) -> None:
        named = self.unwrapped_model.named_parameters()
        self.gradients = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
        super().optimizer_step()


class TracingRunner(dl.TorchRunner):
    """A runner with dropout that writes down sample ids, losses and rates, and stops where it is told."""

    not_saved = ("ids", "trace")

    def __init__(
        self, config: Mapping[str, Any], *, stop_at: int | None = None, train_size: int = 26
    ) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.ids: list[int] = []
        self.trace: list[tuple[float, float, float]] = []
        self.model = nn.Sequential(
            nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": NoisyPoints(train_size), "val": NoisyPoints(7)}
        self.metrics = {"acc": dl.metrics.accuracy}

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        self.ids += data["index"].tolist()
        return super().train_step((data["input"], data["target"]))

    def evaluate_step(self, data: dict[str, Any]) -> tuple[Any, Tensor | None]:
        return super().evaluate_step((data["input"], data["target"]))

    def step(self) -> Any:
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        rate = self.optimizer.param_groups[0]["lr"]
        outcome = super().step()
        self.trace.append((float(outcome.loss_sum), float(outcome.weight), rate))
        return outcome


def whole_state(runner: dl.TorchRunner) -> dict[str, Any]:
    """Return the state of a run that is not closed, less what says on which attempt and under which configuration it was reached."""
    payload = runner.state_dict()
    payload.pop("runner")
    payload["state"].pop("elastic")
    return payload


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return where two nested states are not bitwise the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return [f"{path}: keys {sorted(map(str, first.keys() ^ second.keys()))}"]
        return [
            line for key in first for line in differences(first[key], second[key], f"{path}/{key}")
        ]
    if (
        isinstance(first, (list, tuple))
        and isinstance(second, (list, tuple))
        and len(first) == len(second)
    ):
        return [
            line
            for i, (a, b) in enumerate(zip(first, second))
            for line in differences(a, b, f"{path}/{i}")
        ]
    return (
        []
        if first == second or (first != first and second != second)
        else [f"{path}: {first!r} is not {second!r}"]
    )
