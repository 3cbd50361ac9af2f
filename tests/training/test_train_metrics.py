"""Metrics of training, and how many samples a score is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import danling as dl
from danling.metrics import Meters, MetricSet, TrainMetrics

SAMPLES = 22


class Metered(dl.Runner):
    """A classifier that keeps all its predictions, so that each metric can be computed from them at once."""

    def __init__(self, config: dict[str, Any], stop_at: int | None = None) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.model, self.criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, 4, generator=generator)
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        self.datasets = {"train": data, "val": data}
        self.metrics = {
            "acc": dl.metrics.accuracy,
            "torch": MetricCollection({"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)}),
        }

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        pred, loss = super().train_step(data)
        self.seen.append((pred.detach(), data[1]))
        self.log_metric("confidence", pred.detach().softmax(1).amax(1).mean())
        self.log_metric("first", pred.detach()[0, 0], weight=1)
        return pred, loss

    def evaluate_step(self, data: Any) -> tuple[Any, Any]:
        pred, loss = super().evaluate_step(data)
        self.log_metric("confidence", pred.softmax(1).amax(1).mean())
        return pred, loss

    def step(self) -> Any:
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        return super().step()


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    base = {"seed": 1, "epochs": 2, "dir": str(root), "train_metrics": True, "auto_resume": True}
    base |= {
        "dataloader": {"batch_size": 4, "drop_last": False},
        "optim": {"type": "sgd", "lr": 0.5},
    }
    return {**base, "checkpoint.async_enabled": False, **changes}


def train(
    config: dict[str, Any], stop_at: int | None = None
) -> tuple[dict[int, Any], list[tuple[Tensor, Tensor]]]:
    with Metered(config, stop_at) as runner:
        runner.train()
        return runner.results, runner.seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_of_training_are_those_of_all_predictions_of_the_pass(
    world_size: int, tmp_path: Path
) -> None:
    told = run_processes(train, settings(tmp_path), world_size=world_size)
    results = told[0][0]
    assert all(other == results for other, _ in told)
    updates = len(told[0][1]) // 2
    seen = [pair for _, of_rank in told for pair in of_rank[updates:]]
    pred, target = torch.cat([p for p, _ in seen]), torch.cat([t for _, t in seen])
    assert len(pred) == SAMPLES
    expected = {
        "acc": float((pred.argmax(1) == target).double().mean()),
        "torch.f1": float(MulticlassF1Score(3)(pred, target)),
        "torch.auroc": float(MulticlassAUROC(3)(pred, target)),
        "confidence": float(pred.softmax(1).amax(1).mean()),
        "first": sum(float(p[0, 0]) for p, _ in seen) / len(seen),
    }
    found = results[2]["train"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert set(results[2]["val"]) == {"loss", "acc", "torch.f1", "torch.auroc", "confidence"}
    assert results[1]["train"]["acc"] != found["acc"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("train_mean/acc") == found["acc"] for line in lines)
    assert any(line.get("train_mean/first") == found["first"] for line in lines)


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_go_on_within_a_pass_after_a_resume(world_size: int, tmp_path: Path) -> None:
    whole, _ = run_processes(train, settings(tmp_path / "whole"), world_size=world_size)[0]
    for stop_at in (1, 2):
        config = settings(tmp_path / str(stop_at))
        run_processes(train, config, stop_at, world_size=world_size)
        assert run_processes(train, config, world_size=world_size)[0][0] == whole


class MeteredLate(Metered):
    """Makes its metrics where it makes its loaders."""

    def build_dataloaders(self) -> None:
        super().build_dataloaders()
        self.metrics = {"late": dl.metrics.accuracy}


class MeteredInPlace(Metered):
    """Exchanges its metrics in the mapping that `__init__` has set."""

    def build_dataloaders(self) -> None:
        super().build_dataloaders()
        del self.metrics["acc"]
        self.metrics["late"] = dl.metrics.accuracy


@pytest.mark.parametrize("program", [MeteredLate, MeteredInPlace])
def test_metrics_that_a_hook_sets_are_computed(program: type[Metered], tmp_path: Path) -> None:
    with program(settings(tmp_path, epochs=1)) as runner:
        runner.train()
        assert all(
            "late" in runner.results[1][split] and "acc" not in runner.results[1][split]
            for split in ("train", "val")
        )


@pytest.mark.parametrize("change", ["replaced", "added", "another object", "removed"])
def test_metrics_that_change_after_construction_are_refused(change: str, tmp_path: Path) -> None:
    with Metered(settings(tmp_path)) as runner:
        before = dict(runner.metrics)
        if change == "replaced":
            runner.metrics = {"late": dl.metrics.accuracy}
        elif change == "removed":
            runner.metrics = None
        else:
            runner.metrics["late" if change == "added" else "acc"] = lambda pred, target: 0.0
        for call in (
            runner.train,
            lambda: runner.evaluate("val"),
            lambda: runner.train_epoch("train"),
        ):
            with pytest.raises(
                ValueError, match=r"Expected self\.metrics as it was .* Set all metrics in __init__"
            ):
                call()
        # The same metrics in another mapping are no change.
        runner.metrics = before
        runner.train()
        assert {"acc", "torch.f1"} <= runner.results[2]["val"].keys()


class MeteredByProperty(Metered):
    """Has its metrics in a property, which makes them each time."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "metrics":
            super().__setattr__(name, value)

    @property
    def metrics(self) -> Any:
        return {"made": lambda pred, target: 0.5}


def test_metrics_of_a_property_are_computed(tmp_path: Path) -> None:
    with MeteredByProperty(settings(tmp_path, epochs=1)) as runner:
        runner.train()
        assert runner.results[1]["val"]["made"] == 0.5


def test_chosen_ones_by_name(tmp_path: Path) -> None:
    results, _ = run_processes(train, settings(tmp_path, train_metrics=["torch"]), world_size=1)[0]
    assert {name.partition(".")[0] for name in results[1]["train"]} == {
        "loss",
        "confidence",
        "first",
        "torch",
    }


class Merged:
    def update(self, pred: Any, target: Any) -> None: ...
    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...
    def merge_state(self, other: Any) -> None: ...


def test_other_names_and_unsavable_objects_within_a_pass_are_refused() -> None:
    metrics, meters = MetricSet({"acc": dl.metrics.accuracy, "merged": Merged()}), Meters()
    with pytest.raises(
        ValueError, match=r"\['acc', 'merged'\]. Received: train_metrics=\['accuracy'\]"
    ):
        TrainMetrics(metrics, ["accuracy"], meters)
    with pytest.raises(ValueError, match="Received: 'merged', a Merged"):
        TrainMetrics(metrics, True, meters)


def steps(root: Path, budget: int, batch_size: int, **changes: Any) -> dict[str, Any]:
    intervals = {"evaluate_interval": 20, "checkpoint.interval": 20, "log_seconds": 0}
    return settings(root, epochs=None, steps=budget, **intervals, **changes) | {
        "dataloader": {"batch_size": batch_size, "drop_last": False}
    }


def text_of(root: Path) -> str:
    return "".join(path.read_text() for path in sorted((root / "logs").iterdir()))


def test_results_lines_and_best_name_the_samples_of_a_score(tmp_path: Path) -> None:
    results, _ = run_processes(train, steps(tmp_path, 40, 4), world_size=1)[0]
    assert [result["val"]["samples"] for result in results.values()] == [8.0, 8.0]
    assert json.loads((tmp_path / "results.json").read_text())["40"]["val"]["samples"] == 8
    assert json.loads((tmp_path / "best.json").read_text())["samples"] == 8
    assert "(8 samples)" in text_of(tmp_path) and "compared all the same" not in text_of(tmp_path)


@pytest.mark.parametrize(
    ("budget", "batch_size", "world_size", "samples"),
    [(60, 2, 1, 6), (80, 4, 1, 16), (60, 2, 2, 12)],
    ids=["batch", "steps", "ranks"],
)
def test_a_score_of_another_number_of_samples_is_not_compared_in_silence(
    budget: int, batch_size: int, world_size: int, samples: int, tmp_path: Path
) -> None:
    run_processes(train, steps(tmp_path, 40, 4), world_size=1)
    same_update = {"accum_steps": 4 // (batch_size * world_size)}
    run_processes(train, steps(tmp_path, budget, batch_size, **same_update), world_size=world_size)
    assert (
        f"is of {samples} samples, that of step 40 of 8: they are compared all the same"
        in text_of(tmp_path)
    )
    assert text_of(tmp_path).count("compared all the same") == 1
