"""What a run is asked and told while it trains: signals after the last update, heartbeats, figures of one's own."""

from __future__ import annotations

import json
import os
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import TracingRunner

from danling.supervision import GcPacer, Heartbeat, Profiler

CONFIG = {"epochs": 2, "seed": 3, "dataloader": {"batch_size": 4}, "optim": {"type": "sgd", "lr": 0.1}, "dir": "run"}


class SignalledInLastSave(TracingRunner):
    """Is sent a signal while it saves for the last time."""

    number = signal.SIGTERM

    def save_checkpoint(self, **options: Any) -> None:
        if self.state.train.epoch == 2:
            os.kill(os.getpid(), self.number)
        super().save_checkpoint(**options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_a_signal_in_the_last_save_ends_the_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(SignalledInLastSave, "number", number)
    with SignalledInLastSave(CONFIG) as runner, pytest.raises(SystemExit) as end:
        runner.train()
    assert end.value.code == code
    with TracingRunner({**CONFIG, "auto_resume": True}) as again:
        assert again.state.train.epoch == 2 and again.results.keys() == {1, 2}


class Adding(TracingRunner):
    """Adds a figure to those of an evaluation."""

    figure: Any = None

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        return {**super().summarize(split, totals), "mine": self.figure}


NUMBERS = [
    1.5,
    np.float32(1.5),
    np.array(1.5),
    torch.tensor(1.5),
    torch.tensor([1.5], requires_grad=True),
    Fraction(3, 2),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_a_figure_of_any_numeric_kind_is_a_float(tmp_path: Path, number: Any) -> None:
    with Adding(CONFIG) as runner:
        runner.figure = number
        runner.meters.update({"metered": number})
        assert runner.meters.state_dict() == {"metered": [1.5, 1.0]}
        runner.train()
        assert type(runner.results[1]["val"]["mine"]) is float and runner.results[1]["train"]["metered"] == 1.5
    with Adding({**CONFIG, "auto_resume": True}) as again:
        assert again.results[2]["val"]["mine"] == 1.5


@pytest.mark.parametrize("odd", [None, "1.5", {"a": 1.0}, torch.ones(2), np.ones(2), torch.tensor(1j)], ids=repr)
def test_a_figure_that_is_no_number_is_named(tmp_path: Path, odd: Any) -> None:
    with Adding(CONFIG) as runner:
        runner.figure = odd
        with pytest.raises(ValueError, match="'val/mine'"):
            runner.evaluate("val")
        with pytest.raises(ValueError, match="'metered'"):
            runner.meters.update({"metered": odd})


class MeteringLoss(TracingRunner):
    """Adds a loss of its own to the runner's, as other trainers want it."""

    where = "train"

    def train_step(self, data: Any) -> Any:
        if self.where == "train":
            self.meters.update({"loss": 7.0})
        return super().train_step(data)

    def evaluate_step(self, data: Any) -> Any:
        pred, loss = super().evaluate_step(data)
        self.meters.update({"loss" if self.where == "evaluate" else "own": loss}, 2)
        return pred, loss


def test_a_meter_cannot_change_the_loss(tmp_path: Path) -> None:
    with MeteringLoss(CONFIG) as runner:
        with pytest.raises(ValueError, match="'loss', which the runner computes itself"):
            runner.train()
        runner.where = "evaluate"
        with pytest.raises(ValueError, match="'loss', which the runner computes itself"):
            runner.evaluate("val")
        runner.where = "nowhere"
        assert set(runner.evaluate("val")["val"]) >= {"loss", "own"}


def test_each_of_two_open_runners_has_a_log_of_its_own(tmp_path: Path) -> None:
    with TracingRunner({**CONFIG, "dir": "first"}) as first, TracingRunner({**CONFIG, "dir": "second"}) as second:
        first.train()
        second.train()
        texts = [runner.workspace.log_file.read_text() for runner in (first, second)]
    assert [text.count("Training from") for text in texts] == [text.count("Finished") for text in texts] == [1, 1]


def test_the_last_heartbeat_counts_the_last_epoch(tmp_path: Path) -> None:
    with TracingRunner({**CONFIG, "heartbeat": {"enabled": True}}) as runner:
        runner.train()
        step = runner.state.train.global_step
    last = json.loads(Path("run/heartbeats/rank-0.json").read_text())
    assert (last["status"], last["global_step"], last["epoch"]) == ("stopped", step, 2)


class Diverged(TracingRunner):
    """Has no update that could be committed."""

    def train_step(self, data: Any) -> Any:
        return super().train_step({**data, "input": data["input"] / 0.0})


def test_skipped_updates_are_steps_for_those_who_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = {"heartbeat": {"enabled": True}, "gc": {"interval": 1}, "epochs": 1, "skip_nonfinite_grad": True}
    seen: list[str] = []
    monkeypatch.setattr(Heartbeat, "beat", lambda *_: seen.append("beat"))
    monkeypatch.setattr(GcPacer, "update_ended", lambda *_: seen.append("collect"))
    monkeypatch.setattr(Profiler, "update_ended", lambda *_: seen.append("profile"))
    with Diverged({**CONFIG, **watched, "profiling": {"enabled": True}}) as runner:
        runner.train()
        skipped = runner.state.train.skipped_updates
    assert skipped > 1
    assert [seen.count(name) for name in ("collect", "profile")] == [skipped, skipped]
    assert seen.count("beat") > skipped
