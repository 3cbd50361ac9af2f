"""The trial of an evaluation before training changes nothing: neither at the start nor at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from support.toys import differences, line_of, settings
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanMetric

import danling as dl
from danling.metrics import MetricSet
from danling.metrics.collection import can_be_drawn


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, [torch.zeros(2)]


class Lasting:
    """A metric that keeps something over `reset`."""

    def __init__(self) -> None:
        self.total, self.ever = 0.0, torch.zeros(())

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.total += float(pred.sum())
        self.ever += 1

    def compute(self) -> float:
        return self.total * float(self.ever)

    def reset(self) -> None:
        self.total = 0.0

    def merge_state(self, other: Lasting) -> None:
        self.total += other.total


class Running:
    """A callable metric with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, pred: Tensor, target: Tensor) -> float:
        self.calls += 1
        return float(self.calls)


class Resetting(MeanMetric):
    """A metric of torchmetrics that counts its resets."""

    def __init__(self) -> None:
        super().__init__()
        self.resets = 0

    def update(self, pred: Tensor, target: Tensor) -> None:
        super().update(pred)

    def reset(self) -> None:
        self.resets += 1
        super().reset()


class Careless(dl.Runner):
    """Has an evaluation that changes all kinds of state, and a training that depends on it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(5)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.model.register_buffer("asked", torch.zeros(()))
        self.model.register_buffer("hidden", torch.zeros(()), persistent=False)
        self.datasets = {"train": line_of(16), "val": line_of(6)}
        self.lasting = Lasting()
        self.metrics = {"lasting": self.lasting, "running": Running(), "resetting": Resetting()}
        self.scale, self.past, self.by_name = 1.0, [], {"a": 0}
        self.tensor, self.array, self.counter = torch.zeros(3), numpy.zeros(2), Counter()
        self.generator = torch.Generator().manual_seed(1)
        self.passing = "there"
        self.metrics_seen = 0

    def train_step(self, data: Any) -> Any:
        factor = (
            self.scale
            + float(self.tensor.sum())
            + len(self.past)
            + self.counter.calls
            + self.metrics["running"].calls
        )
        factor += (
            float(self.unwrapped_model.asked + self.unwrapped_model.hidden + self.lasting.ever)
            + self.metrics["resetting"].resets
        )
        return super().train_step((data[0] * (1 + 0.01 * factor), data[1]))

    def evaluate_step(self, data: Any) -> Any:
        self.scale += 1
        self.past.append(torch.ones(2))
        self.by_name["b"] = 2
        self.tensor += 1
        self.array[0] = 3
        self.counter.calls += 1
        self.counter.new = 1
        self.counter.seen[0] += 1
        self.model.asked = self.model.asked + 1
        self.model.hidden += 1
        self.metrics_seen += 1
        self.log_metric("drawn", torch.rand((), generator=self.generator))
        self.late = getattr(self, "late", 0) + 1
        if hasattr(self, "passing"):
            del self.passing
        return super().evaluate_step(data)


def state_of(runner: Careless) -> dict[str, Any]:
    """Return copies of all that an evaluation of this runner changes."""
    names = ("scale", "past", "by_name", "tensor", "passing", "late", "metrics_seen")
    found: dict[str, Any] = {name: vars(runner).get(name, "none") for name in names}
    found |= {"array": torch.from_numpy(runner.array), "generator": runner.generator.get_state()}
    found |= {"counter": vars(runner.counter), "lasting": vars(runner.lasting)}
    found |= {
        "running": vars(runner.metrics["running"]),
        "resets": runner.metrics["resetting"].resets,
    }
    found |= {"buffers": dict(runner.unwrapped_model.named_buffers())}
    if runner.ema is not None:
        found["averages"] = runner.ema.weights
    return copied(found)


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def tried(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what the trial of an evaluation changes, and what an evaluation does."""
    with Careless(config) as runner:
        before, objects = (
            state_of(runner),
            (runner.past, runner.counter, runner.lasting, runner.model.asked),
        )
        runner._parts.evaluator.try_once(["val"])
        assert all(
            now is then for now, then in zip((runner.past, runner.counter, runner.lasting), objects)
        )
        after = state_of(runner)
        runner.evaluate("val")
        return differences(after, before), differences(state_of(runner), before)


def test_changes_of_an_evaluation_are_restored_after_its_trial(tmp_path: Path) -> None:
    for ema in (False, True):
        by_trial, by_evaluation = tried(settings(tmp_path / str(ema), ema={"enabled": ema}))
        assert by_trial == []
        places = (
            "scale",
            "past",
            "by_name",
            "tensor",
            "array",
            "generator",
            "late",
            "passing",
            "counter",
            "lasting",
            "running",
            "resets",
        )
        assert all(
            any(line.startswith(f"/{place}") for line in by_evaluation) for place in places
        ), by_evaluation


def trained(config: dict[str, Any]) -> dict[str, Tensor]:
    for steps in (3, 6):
        with Careless({**config, "steps": steps, "auto_resume": True}) as runner:
            runner.train()
            # A trial of each start is another one than the evaluations of the run.
            weights = {name: value.clone() for name, value in runner.model_state_dict().items()}
    return weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_the_trial_is_bitwise_one_without_it_also_after_a_resume(
    ranks: int, tmp_path: Path
) -> None:
    found = []
    for trial in (True, False):
        config = settings(tmp_path / str(trial), try_evaluation=trial, evaluate_interval=2)
        found.append(
            run_processes(trained, config, world_size=ranks) if ranks > 1 else [trained(config)]
        )
    for with_trial, without in zip(*found):
        assert differences(with_trial, without) == []


def test_unrestorable_change_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("danling.training.attributes.REMEMBERED_BYTES", 2**16)

    class Large(Careless):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.large, self.kept = torch.zeros(2**16), torch.zeros(2**16)
            self.counter.sparse = torch.zeros(3).to_sparse()

        def evaluate_step(self, data: Any) -> Any:
            self.large += 1
            return super().evaluate_step(data)

    with Large(settings(tmp_path)) as runner:
        runner._parts.evaluator.try_once(["val"])
        assert float(runner.large[0]) == 1.0
    lines = [message for message in caplog.messages if "trial of an evaluation" in message]
    assert (
        len(lines) == 1 and "self.counter, self.large" in lines[0] and "self.kept" not in lines[0]
    )


METRICS: dict[str, tuple[Any, bool]] = {
    "mean": (lambda pred, target: (pred - target).abs().mean(), True),
    "number": (lambda pred, target: float((pred - target).abs().mean()), True),
    "values": (lambda pred, target: (pred - target).abs()[:, 0], True),
    "sum and weight": (lambda pred, target: ((pred - target).square().sum(), len(pred)), True),
    "root": (lambda pred, target: (pred - target).square().mean().sqrt(), False),
    "deviation": (lambda pred, target: pred.std(), False),
    "no number": (lambda pred, target: float("nan"), True),
}


class Measured(dl.Runner):
    def __init__(self, config: Mapping[str, Any], name: str, metric: Any) -> None:
        super().__init__(config)
        inputs = torch.arange(30.0).reshape(10, 3).square()
        self.datasets = {
            split: TensorDataset(inputs, inputs[:, :1]) for split in ("train", "val", "test")
        }
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.metrics = {name: metric}


def measured_settings(root: Path) -> dict[str, Any]:
    return settings(
        root, steps=None, epochs=2, optim={"type": "sgd", "lr": 1e-6}, dataloader={"batch_size": 5}
    )


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_is_no_mean_over_samples_is_named_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric, is_mean = METRICS[name]
    with Measured(measured_settings(tmp_path), name, metric) as runner:
        runner.train()
    lines = [line for line in caplog.messages if "to be a mean over samples" in line]
    assert len(lines) == (0 if is_mean else 1)


def f1(pred: Tensor, target: Tensor) -> float:
    positive = pred.argmax(-1) == 1
    hits = int((positive & (target == 1)).sum())
    return 2 * hits / max(int(positive.sum()) + int((target == 1).sum()), 1)


def accuracy(pred: Tensor, target: Tensor) -> float:
    return float((pred.argmax(-1) == target).double().mean())


class OneClass(dl.Runner):
    """Predicts class 0 for all samples, until it is trained."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        data = TensorDataset(
            torch.arange(40.0).reshape(20, 2).sin(), torch.tensor([0, 1, 1, 1] * 5)
        )
        self.datasets = {"train": data, "val": data}
        self.model, self.criterion = nn.Linear(2, 2), nn.CrossEntropyLoss()
        with torch.no_grad():
            self.model.bias.copy_(torch.tensor([9.0, -9.0]))
        self.metrics = {"f1": f1, "accuracy": accuracy}


def test_f1_is_named_before_training_although_the_model_predicts_one_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with OneClass(settings(tmp_path, steps=1, dataloader={"batch_size": 5})) as runner:
        assert set(runner.model(runner.datasets["val"].tensors[0]).argmax(-1).tolist()) == {0}
        runner.train()
    lines = [line for line in caplog.messages if "to be a mean over samples" in line]
    assert [("'f1'" in line, "'accuracy'" in line) for line in lines] == [(True, False)]


def time_first(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([values for values, _ in samples], 1), torch.stack(
        [labels for _, labels in samples], 1
    )


class LastStep(dl.Runner):
    """Classifies each step of sequences, whose batches have the time first, and measures the last step."""

    def __init__(self, config: Mapping[str, Any], own_loader: bool) -> None:
        super().__init__(config)
        data: Any = [
            (torch.arange(21.0).add(7 * index).sin().reshape(7, 3), torch.arange(7) % 3)
            for index in range(16)
        ]
        self.datasets = {"train": data, "val": data}
        if own_loader:
            loaders: dict[str, Any] = {
                split: DataLoader(data, batch_size=8, collate_fn=time_first)
                for split in self.datasets
            }
            self.datasets, self.dataloaders = {}, loaders
        self.model = nn.Linear(3, 3)
        self.criterion = lambda pred, target: nn.functional.cross_entropy(
            pred.flatten(0, 1), target.flatten()
        )
        self.metrics = {"last": lambda pred, target: accuracy(pred[-1], target[-1])}


@pytest.mark.parametrize("own_loader", [False, True])
def test_halves_of_the_time_are_not_halves_of_the_samples(
    own_loader: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = {} if own_loader else {"batch_size": 8, "collate_fn": time_first}
    with LastStep(settings(tmp_path, steps=1, dataloader=loader), own_loader) as runner:
        runner.train()
    assert not [line for line in caplog.messages if "to be a mean over samples" in line]


def test_random_predictions_are_of_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a language model would take gigabytes."""
    monkeypatch.setattr("danling.metrics.collection._MOST_DRAWN", 100)
    seen: list[tuple[int, int]] = []

    def count(pred: Tensor, target: Tensor) -> float:
        seen.append((len(pred), len(target)))
        return 0.0

    pred, target = torch.rand(8, 5, 6), torch.rand(8)
    assert can_be_drawn(pred)
    MetricSet({"count": count}).no_means(pred, target, draws=True)
    assert seen == [(8, 8), (4, 4), (4, 4), *([(3, 3), (1, 1), (2, 2)] * 4)]


@pytest.mark.parametrize(
    "pred",
    [
        torch.rand(8, 5, 20),
        torch.rand(()),
        torch.rand(1, 2),
        torch.ones(4, dtype=torch.int64),
        torch.rand(4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.nested.nested_tensor([torch.rand(3), torch.rand(2)], layout=torch.jagged),
        [torch.rand(4)],
    ],
)
def test_predictions_that_cannot_be_drawn_are_left_alone(
    pred: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danling.metrics.collection._MOST_DRAWN", 100)
    assert not can_be_drawn(pred)


def over_ranks(pred: Tensor, target: Tensor) -> Tensor:
    """A metric that reduces itself, as in a loop by hand."""
    error = (pred - target).abs().mean()
    dist.all_reduce(error)
    return error / dist.get_world_size()


def train_measured(root: Path, samples: int) -> float:
    with Measured(measured_settings(root), "error", over_ranks) as runner:
        runner.datasets["val"] = Subset(runner.datasets["val"], range(samples))
        runner.train()
        return float(runner.latest_result["val"]["error"])


@pytest.mark.parametrize("samples", [10, 3])  # of 3 samples, one rank has a batch with one
def test_a_metric_that_communicates_is_tried_on_all_ranks(samples: int, tmp_path: Path) -> None:
    first, second = run_processes(train_measured, tmp_path, samples, timeout=120)
    assert first == second
