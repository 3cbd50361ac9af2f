"""Objects in `self.metrics`: what they keep beyond a reset comes back, and updates of the program's own are named."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric, Running

import danling as dl

SAMPLES = 36


class MeanLogit(MeanMetric):
    """Its mean is of the first logit, whatever the target."""

    full_state_update = False

    def update(self, pred: Tensor, target: Tensor) -> None:
        super().update(pred[:, 0])


class Plain:
    """An object of another library than torchmetrics, with the best value so far."""

    def __init__(self) -> None:
        self.best = -1.0
        self.values: list[float] = []

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.values.append(float(pred[:, 0].mean()))

    def merge_state(self, other: Any) -> None:
        self.values += other.values

    def compute(self) -> float:
        self.best = max(self.best, sum(self.values) / len(self.values))
        return self.best

    def reset(self) -> None:
        self.values = []


class Metered(dl.Runner):
    not_saved = ("stop_at", "seen")

    def __init__(self, config: Mapping[str, Any], stop_at: int | None) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.model, self.criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, 4, generator=generator)
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        self.datasets = {"train": data, "val": data}
        self.metrics = {
            "window": Running(MeanLogit(), window=3),
            "extremes": MinMaxMetric(MulticlassAccuracy(3)),
        }
        self.seen: list[float] = []

    def train_step(self, data: Any) -> Any:
        pred, loss = super().train_step(data)
        self.seen.append(float(pred.detach()[:, 0].mean()))
        return pred, loss

    def step(self) -> Any:
        if self.stop_at is not None and self.train_state.global_step == self.stop_at - 1:
            self.stop()
        return super().step()


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "seed": 1,
        "epochs": 3,
        "dir": str(root),
        "train_metrics": True,
        "auto_resume": True,
        "log": False,
    }
    base |= {
        "dataloader": {"batch_size": 4, "drop_last": False},
        "optim": {"type": "sgd", "lr": 0.5},
    }
    return {**base, **changes}


def train(
    config: Mapping[str, Any], stop_at: int | None = None
) -> tuple[dict[int, Any], list[float]]:
    with Metered(config, stop_at) as runner:
        runner.train()
        return runner.results, runner.seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_attributes_of_objects_come_back(world_size: int, tmp_path: Path) -> None:
    whole, _ = run_processes(train, settings(tmp_path / "whole"), world_size=world_size)[0]
    updates = SAMPLES // 4 // world_size
    # In the second pass, of which the window knows the last three updates, and within the third.
    for stop_at in (updates + 2, 2 * updates + 1):
        config = settings(tmp_path / str(stop_at))
        run_processes(train, config, stop_at, world_size=world_size)
        assert run_processes(train, config, world_size=world_size)[0][0] == whole


def test_window_has_the_last_updates_of_the_pass(tmp_path: Path) -> None:
    results, seen = run_processes(train, settings(tmp_path), world_size=1)[0]
    assert results[3]["train"]["window"] == pytest.approx(sum(seen[-3:]) / 3, abs=1e-6)
    accuracies = [results[epoch]["val"]["extremes.raw"] for epoch in results]
    assert [results[epoch]["val"]["extremes.max"] for epoch in results] == [
        max(accuracies[: number + 1]) for number in range(3)
    ]


class WithPlain(Metered):
    def __init__(self, config: Mapping[str, Any], stop_at: int | None) -> None:
        super().__init__(config, stop_at)
        self.metrics = {"plain": Plain()}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, maximize=True)


def test_number_that_an_object_keeps_beyond_a_reset_comes_back(tmp_path: Path) -> None:
    def results(config: Mapping[str, Any], stop_at: int | None = None) -> dict[int, Any]:
        with WithPlain(config, stop_at) as runner:
            runner.train()
            return {epoch: result["val"] for epoch, result in runner.results.items()}

    whole = results(settings(tmp_path / "whole", train_metrics=False))
    results(settings(tmp_path / "run", train_metrics=False), 9 + 2)
    assert results(settings(tmp_path / "run", train_metrics=False)) == whole


class UpdatesItself(Metered):
    """Calls a metric in `train_step`, and leaves it to the runner what becomes of that."""

    metric: Any = None
    resets = False

    def __init__(self, config: Mapping[str, Any], metric: Any, resets: bool) -> None:
        super().__init__(config, None)
        self.metrics = {"acc": metric, "other": MulticlassAccuracy(3)}
        self.resets = resets

    def train_step(self, data: Any) -> Any:
        pred, loss = super().train_step(data)
        self.metrics["acc"].update(pred.detach(), data[1])
        return pred, loss

    def train_epoch(self, split: str = "train") -> Any:
        figures = super().train_epoch(split)
        if self.resets:
            self.metrics["acc"].reset()
        return figures


def collection() -> Metric:
    metrics: Any = MetricCollection({"accuracy": MulticlassAccuracy(3)})
    return metrics  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [lambda: MulticlassAccuracy(3), collection, Plain], ids=["one", "collection", "plain"]
)
@pytest.mark.parametrize("val", [True, False], ids=["evaluated", "saved"])
def test_updates_in_training_are_named_once(
    make: Any, val: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "danling")
    with UpdatesItself(settings(tmp_path, train_metrics=False), make(), False) as runner:
        if not val:
            del runner.datasets["val"]
        runner.train()
    assert caplog.text.count("self.metrics['acc'] had updates outside of an evaluation.") == 1
    assert "self.metrics['other']" not in caplog.text


class Evaluating(UpdatesItself):
    """Evaluates in a way of its own, which updates the metrics too."""

    def train_step(self, data: Any) -> Any:
        return dl.TorchRunner.train_step(self, data)

    def evaluate_epoch(self, split: str) -> Any:
        figures = super().evaluate_epoch(split)
        self.metrics["acc"].update(torch.eye(3), torch.arange(3))
        return {**figures, "own": float(self.metrics["acc"].compute())}


@pytest.mark.parametrize(
    ("kind", "resets"),
    [(UpdatesItself, True), (Evaluating, False)],
    ids=["resets them", "evaluates by itself"],
)
def test_nothing_is_named_where_nothing_is_lost(
    kind: type[UpdatesItself], resets: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "danling")
    more = {"train_metrics": False, "checkpoint": {"interval": 1}}
    with kind(settings(tmp_path, **more), MulticlassAccuracy(3), resets) as runner:
        runner.evaluate()
        runner.train()
        runner.evaluate()
    assert "outside of an evaluation" not in caplog.text


class Recall:
    """An object that makes new tensors at a reset, and adds to them in place."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits, self.samples = torch.zeros(3), torch.zeros(3)

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.samples += torch.bincount(target, minlength=3)
        self.hits += torch.bincount(target[pred.argmax(1) == target], minlength=3)

    def compute(self) -> Tensor:
        return (self.hits / self.samples.clamp(min=1)).mean()


class WithRecall(Metered):
    """Evaluates two splits, also within an epoch."""

    def __init__(self, config: Mapping[str, Any], metric: Any) -> None:
        super().__init__(config, None)
        self.metrics = {"recall": metric}
        self.datasets["test"] = self.datasets["val"]

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == 4:
            self.evaluate("val")
        return outcome


@pytest.mark.parametrize("make", [Recall, Plain])
def test_no_reset_or_trial_of_the_library_is_named(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "danling")
    for epochs in (1, 2):
        with WithRecall(settings(tmp_path, train_metrics=False, epochs=epochs), make()) as runner:
            runner.train()
    assert "outside of an evaluation" not in caplog.text
