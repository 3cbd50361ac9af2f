"""What the reporter is told of a training, without a runner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.distributed import LocalDomain
from danling.reporting import Reporter
from danling.reporting.run_report import ReportFacts, RunReport


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, values: Any, step: int) -> None:
        self.logged.append((dict(values), step))

    def flush(self) -> None:
        """Have nothing to write."""

    def close(self) -> None:
        """Have nothing to close."""


def report(*, by_steps: bool = False, sums_loss: bool = False) -> tuple[RunReport, Any, Kept, list[str]]:
    asked: list[str] = []
    counters = SimpleNamespace(global_step=3, epoch=1, samples=12)
    reporter, kept = Reporter(is_main=True, world_size=1, seconds_between_lines=0), Kept()
    reporter.trackers.add(kept)
    reporter.trackers.open()
    facts = ReportFacts(
        counters=lambda: counters,
        count_samples=lambda: setattr(counters, "samples", 20),
        epochs=lambda: None if by_steps else 5,
        steps=lambda: 10,
        by_steps=lambda: by_steps,
        index=lambda: counters.global_step if by_steps else counters.epoch,
        trained=lambda: ["train"],
        learning_rates=lambda: [0.25],
        sums_loss=lambda: sums_loss,
        flops_per_token=lambda: asked.append("token"),
        flops_per_sample=lambda: asked.append("sample"),
        ended=lambda: True,
    )
    made = RunReport(reporter, facts, domain=LocalDomain(), counts_samples=True, device=torch.device("cpu"))
    made.begin(
        name="exp",
        peak_flops=None,
        countable=True,
        seconds_between_lines=7,
        profiler=None,
        description=lambda: ["Training from here"],
    )
    return made, counters, kept, asked


@pytest.mark.parametrize(("sums_loss", "loss"), [(False, 2.0), (True, 8.0)])
def test_an_update_is_logged_with_samples_that_are_up_to_date(sums_loss: bool, loss: float) -> None:
    made, counters, kept, asked = report(sums_loss=sums_loss)
    assert asked == ["token", "sample"] and made.reporter.seconds_between_lines == 7
    made.log_update(SimpleNamespace(loss=2.0, loss_sum=8.0, grad_norm=0.5))
    values, step = kept.logged[0]
    assert step == 3 and counters.samples == 20
    assert (values["train/loss"], values["train/grad_norm"], values["train/learning_rate"]) == (loss, 0.5, 0.25)
    made.reporter.end()


@pytest.mark.parametrize(("by_steps", "title"), [(True, "step 3: "), (False, "epoch 3: ")])
def test_results_and_the_end_are_said(by_steps: bool, title: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "danling")
    made, counters, kept, _ = report(by_steps=by_steps)
    assert made.reporter.bar is not None and made.reporter.bar.epoch == ("" if by_steps else "epoch 2/5")
    counters.epoch += 2  # no update was logged meanwhile
    made.log_result({"train": {"loss": 1.0}, "val": {"loss": 0.5}})
    assert made.reporter.bar.epoch == ("" if by_steps else "epoch 4/5"), "the bar shows the epoch of the result"
    assert kept.logged == [({"train_mean/loss": 1.0, "val/loss": 0.5}, 3)]
    made.say_ending("Finished")
    made.reporter.end()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "Training from here" and messages[1].startswith(title)
    assert messages[-1].startswith("Finished: ")
