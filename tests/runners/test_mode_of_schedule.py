"""A schedule that follows the score falls when the score does not get better, in the score's own direction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.processes import run_processes
from support.toys import line_of, settings
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import danling as dl

RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5]
FALLING = [0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5]
PLATEAU = {"type": "reducelronplateau", "patience": 1, "factor": 0.5}


class Scored(dl.Runner):
    """Has a metric whose values are given."""

    values = RISING
    metric = "acc"
    own: ClassVar[Mapping[str, Any] | None] = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": line_of(8), "val": line_of(4)}
        if self.own is not None:
            self.optimizer = SGD(self.model.parameters(), lr=0.1)
            self.scheduler = ReduceLROnPlateau(self.optimizer, **self.own)

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        return {
            **super().summarize(split, totals),
            self.metric: self.values[self.train_state.epoch],
        }


def rate_by_hand(values: list[float], mode: str) -> float:
    """Return the rate after torch's own schedule has seen some values."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, mode=mode, patience=1, factor=0.5)
    for value in values:
        schedule.step(value)
    return float(optimizer.param_groups[0]["lr"])


def rate_of(runner_class: type[Scored], config: dict[str, Any], *ends: int) -> float:
    """Train to each of some epochs in a runner of its own, and return the last rate."""
    for epochs in ends:
        with runner_class({**config, "epochs": epochs, "auto_resume": True}) as runner:
            runner.train()
    return float(runner.optimizer.param_groups[0]["lr"])


class Falling(Scored):
    values = FALLING
    metric = "wer"


def rate_of_rising(root: str) -> float:
    return rate_of(Scored, settings(root, score_name="acc", scheduler=PLATEAU), 3, 7)


@pytest.mark.parametrize(
    ("runner_class", "more", "mode"),
    [
        (Scored, {"score_name": "acc"}, "max"),
        (Falling, {"score_name": "wer"}, "min"),
        (Falling, {"score_name": "wer", "score_mode": "max"}, "max"),
        (Scored, {"scheduler.monitor": "val.acc"}, "max"),
        (Scored, {"score_name": "acc", "scheduler.monitor": "val.acc"}, "max"),
        (Scored, {"score_name": "acc", "scheduler.mode": "min"}, "min"),
    ],
)
def test_configured_schedule_has_the_mode_of_its_metric(
    runner_class: type[Scored], more: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, scheduler=PLATEAU)
    config["scheduler"] = {
        **PLATEAU,
        **{key.rpartition(".")[2]: more.pop(key) for key in list(more) if "." in key},
    }
    found = rate_of(runner_class, config | more, 3, 7)
    assert found == rate_by_hand(runner_class.values[:7], mode)
    assert rate_by_hand(runner_class.values[:7], "min") != rate_by_hand(
        runner_class.values[:7], "max"
    )


def test_the_rate_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    assert run_processes(rate_of_rising, str(tmp_path)) == [rate_by_hand(RISING[:7], "max")] * 2


@pytest.mark.parametrize(("mode", "warns"), [("min", True), ("max", False)])
def test_an_assigned_schedule_of_the_other_mode_is_named(
    mode: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Assigned(Scored):
        own: ClassVar[Mapping[str, Any]] = {"mode": mode, "patience": 1, "factor": 0.5}

    found = rate_of(Assigned, settings(tmp_path, score_name="acc"), 5)
    assert found == rate_by_hand(RISING[:5], mode)
    lines = [message for message in caplog.messages if "mode of the score val.acc" in message]
    assert len(lines) == warns


def test_older_checkpoint_with_the_wrong_mode_continues_with_the_mode_of_the_score(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")

    class Older(Scored):
        """Makes the schedule as fae50579 did."""

        def build_scheduler(self) -> Any:
            return ReduceLROnPlateau(self.optimizer, mode="min", patience=1, factor=0.5)

    config = settings(tmp_path, score_name="acc", scheduler=PLATEAU)
    assert rate_of(Older, config, 2) == rate_of(Scored, config, 5) == 0.1
    assert sum("follows the highest value now" in message for message in caplog.messages) == 1
