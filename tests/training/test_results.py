"""Results by themselves: what is recorded, what a schedule watches, and when patience is at its end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from danling.metrics import ScoreBoard
from danling.training import TrainingSession
from danling.training.results import BoundarySchedule, RunResults, ScoreFacts


class Recorded:
    """Results of a run that stands at an epoch which the test counts."""

    def __init__(
        self,
        *,
        board: ScoreBoard | None = None,
        own: dict[int, float] | None = None,
        scheduler: Any = None,
        interval: str = "epoch",
        monitor: str | None = None,
        patience: float = 2,
        by_updates: bool = False,
    ) -> None:
        self.index, self.session = 0, TrainingSession()
        self.results: dict[int, dict[str, dict[str, float]]] = {}
        self.reported: list[Any] = []
        scores = (lambda: own) if own is not None else (lambda: dict(board.scores) if board is not None else {})
        facts = ScoreFacts(
            board=lambda: board,
            scores=scores,
            best_score=lambda: board.scores.get(board.best_index) if board is not None else None,  # type: ignore[arg-type]
            best_index=lambda: board.best_index if board is not None else None,
            is_best=lambda: board is not None and board.best_index == next(reversed(scores()), None),
            since_best=self.since_best,
            patience=lambda: patience,
            own=own is not None,
        )
        self.board, self.facts = board, facts
        schedule = BoundarySchedule(
            lambda: scheduler,
            by_updates=lambda: by_updates,
            interval=lambda: interval,
            monitor=lambda: monitor,
            scored=lambda: "val.loss",
            facts=facts,
            index=lambda: self.index,
        )
        self.run = RunResults(
            self,
            facts=facts,
            schedule=schedule,
            session=self.session,
            write=lambda: None,
            report=self.reported.append,
        )

    def since_best(self) -> int:
        assert self.board is not None
        indices = list(self.board.scores)
        best = self.board.best_index
        return len(indices) - 1 - indices.index(best) if best in indices else len(indices)

    def close(self, loss: float, **options: Any) -> None:
        self.index += 1
        self.run.open["val"] = {"loss": loss}
        self.run.close(options.pop("boundary", "epoch"), step=10 * self.index)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_metrics_go_under_their_index_and_the_next_ones_begin_anew() -> None:
    found = Recorded()
    found.close(0.5)
    assert found.results == {1: {"val": {"loss": 0.5}}} == {1: found.reported[0]}
    assert found.run.open == {} and found.run.scored_at == 10
    found.run.reopen({"train": {"loss": 1.0}})
    assert found.run.open == {"train": {"loss": 1.0}}


def test_patience_ends_the_run_and_says_how_long_it_waited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "danling")
    found = Recorded(board=ScoreBoard("loss", split="val"))
    for loss in (0.5, 0.4, 0.6):
        found.close(loss)
        assert found.session.stop_reason is None
    assert found.run.has_best_at(2) is False and not found.run.has_best_at(7)
    found.close(0.45)
    assert found.session.stop_reason == "patience" and "no better score than 0.4 in 2 evaluations." in caplog.text


def test_a_score_that_is_not_finite_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    found = Recorded(board=ScoreBoard("loss", split="val"), patience=float("inf"))
    for loss in (float("nan"), float("inf")):
        found.close(loss)
    (warned,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "val.loss" in warned


def test_a_schedule_by_a_metric_goes_by_the_score_or_by_what_is_named() -> None:
    for monitor, expected in ((None, [1.0, 1.0, 0.1]), ("val.other", None)):
        optimized = optimizer()
        found = Recorded(scheduler=ReduceLROnPlateau(optimized, patience=0), monitor=monitor)
        if expected is None:
            found.run.open["val"] = {"loss": 1.0}
            with pytest.raises(ValueError, match=r"scheduler.monitor to name one of \['val.loss'\]"):
                found.run.check()
            continue
        rates = []
        for loss in (0.5, 0.4, 0.6):
            found.close(loss)
            rates.append(optimized.param_groups[0]["lr"])
        assert rates == pytest.approx(expected)


def test_scores_of_the_users_own_are_what_such_a_schedule_watches() -> None:
    optimized, own = optimizer(), {1: 1.0, 2: 2.0}
    found = Recorded(scheduler=ReduceLROnPlateau(optimized, patience=0), own=own)
    found.run.open["val"] = {"accuracy": 1.0}
    found.run.check()  # nothing is looked for among the metrics
    for _ in own:
        found.index += 1
        found.run.close("epoch", step=found.index)
    assert optimized.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(("interval", "by_updates", "rate"), [("epoch", False, 0.01), ("epoch", True, 1.0)])
def test_a_schedule_by_epochs_advances_at_each_end_of_a_pass(interval: str, by_updates: bool, rate: float) -> None:
    optimized = optimizer()
    scheduler = StepLR(optimized, 1)
    optimized.step()
    found = Recorded(scheduler=scheduler, interval=interval, by_updates=by_updates)
    found.close(0.5)
    found.close(0.5, boundary="validation")  # which is no end of a pass
    found.run.schedule.end_pass()
    assert optimized.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_first_batch_without_the_score_is_refused() -> None:
    found = Recorded(board=ScoreBoard("accuracy", split="val"))
    with pytest.raises(ValueError, match="accuracy"):
        found.run.check_trial("val", {"loss": 1.0}, scored=True)
    found.run.check_trial("val", {"accuracy": 1.0}, scored=True)
    found.run.check_trial("test", {"loss": 1.0}, scored=True)  # which is not scored
    # The loss of a split is there as soon as a batch has one.
    losses = Recorded(board=ScoreBoard("loss", split="val"))
    losses.run.check_trial("val", {}, scored=True)
    with pytest.raises(ValueError, match="loss"):
        losses.run.check_trial("val", {}, scored=False)
