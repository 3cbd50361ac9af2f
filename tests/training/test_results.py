"""Results of a run: what is recorded, what a schedule watches, and when patience is at its end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from danling import TorchRunner


class Scored(TorchRunner):
    def __init__(self, directory: Path, losses: list[float], **settings: Any) -> None:
        self_settings = {"try_evaluation": False, "checkpoint.interval": 100, **settings}
        super().__init__(
            {"dir": directory, "epochs": len(losses), "log": False, "seed": 1, **self_settings}
        )
        self.model, self.criterion = nn.Linear(1, 1), nn.L1Loss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        batch = torch.ones(1, 1), torch.ones(1, 1)
        self.dataloaders = {"train": [batch], "val": [batch]}
        self.losses, self.rates = losses, list[float]()

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        return {"loss": self.losses[self.state.train.epoch]}

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return super().train_epoch(split)


def test_patience_ends_the_run_and_says_how_long_it_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "danling")
    with Scored(tmp_path, [0.5, 0.4, 0.6, 0.45, 0.1], patience=2) as run:
        run.train()
        assert run.state.train.epoch == 4 and run.best_index == 2
        run.train()
    assert "no better score than 0.4 in 2 evaluations." in caplog.text
    assert "the patience of the run is used up. Raise patience" in caplog.text


@pytest.mark.parametrize("patience, epochs", [(0, 2), (float("inf"), 3)])
def test_without_patience_the_first_worse_score_ends_the_run(
    patience: float, epochs: int, tmp_path: Path
) -> None:
    with Scored(tmp_path, [0.5, 0.6, 0.7], patience=patience) as run:
        run.train()
        assert run.state.train.epoch == epochs


def test_nonfinite_score_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Scored(tmp_path, [float("nan"), float("inf"), 0.5]) as run:
        run.train()
    (warned,) = (
        record.getMessage() for record in caplog.records if "to be finite" in record.getMessage()
    )
    assert "val.loss to be finite. Received: nan at 1. NaN is never the best" in warned


PLATEAU = {"type": "reducelronplateau", "patience": 0}
STEPS = {"type": "steplr", "step_size": 1, "gamma": 0.1}


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (PLATEAU, [1.0, 1.0, 1.0, 0.1]),
        ({**PLATEAU, "monitor": "val.loss"}, [1.0, 1.0, 1.0, 0.1]),
        ({**STEPS, "interval": "epoch"}, [1.0, 0.1, 0.01, 0.001]),
        ({**STEPS, "interval": "validation"}, [1.0, 0.1, 0.01, 0.001]),
    ],
)
def test_schedule_follows_the_score_a_named_metric_or_epochs(
    scheduler: dict[str, Any], rates: list[float], tmp_path: Path
) -> None:
    with Scored(tmp_path, [0.5, 0.4, 0.6, 0.7], scheduler=scheduler) as run:
        run.train()
        assert run.rates == pytest.approx(rates)


def test_metric_missing_in_evaluations_is_refused_before_any_count(tmp_path: Path) -> None:
    with Scored(tmp_path, [0.5], scheduler={**PLATEAU, "monitor": "val.other"}) as run:
        with pytest.raises(
            ValueError, match=r"scheduler.monitor to name one of \['train.loss', 'val.loss'\]"
        ):
            run.train()
        assert not run.results


class OwnScores(Scored):
    """Makes scores of something else than an evaluation's metrics."""

    @property
    def scores(self) -> dict[int, float]:
        return {epoch: float(epoch) for epoch in self.results}

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        return {"accuracy": 0.5}


def test_metric_schedule_watches_overridden_scores(tmp_path: Path) -> None:
    with OwnScores(tmp_path, [0.0, 0.0, 0.0], scheduler=PLATEAU) as run:
        run.train()
        assert run.rates == pytest.approx([1.0, 1.0, 0.1])


class TriedScore(TorchRunner):
    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(
            {"dir": directory, "epochs": 1, "log": False, "optim.type": "sgd", "score_name": name}
        )
        self.model, self.criterion = nn.Linear(1, 1), nn.L1Loss()
        batch = torch.ones(1, 1), torch.ones(1, 1)
        self.dataloaders = {"train": [batch], "val": [batch]}


def test_a_first_batch_without_the_score_is_refused_before_the_first_update(tmp_path: Path) -> None:
    with TriedScore(tmp_path / "a", "accuracy") as run:
        with pytest.raises(ValueError, match="accuracy"):
            run.train()
        assert run.state.train.global_step == 0
    with TriedScore(tmp_path / "b", "loss") as run:
        run.train()
