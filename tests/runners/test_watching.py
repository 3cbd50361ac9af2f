"""What watches a run and what it is told: signals, trackers, figures of one's own, heartbeats, skipped updates."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from support.toys import Line, TracingRunner, settings

from danling.reporting import read_jsonl
from danling.supervision import GcPacer, Heartbeat, Profiler

CONFIG = settings("run", epochs=2, log=True)


class SignalledInLastSave(TracingRunner):
    number = signal.SIGTERM

    def save_checkpoint(self, **options: Any) -> None:
        if self.state.train.epoch == 2:
            os.kill(os.getpid(), self.number)
        super().save_checkpoint(**options)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)]
)
def test_a_signal_in_the_last_save_ends_the_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(SignalledInLastSave, "number", number)
    with SignalledInLastSave(CONFIG) as runner, pytest.raises(SystemExit) as end:
        runner.train()
    assert end.value.code == code
    with TracingRunner({**CONFIG, "auto_resume": True}) as again:
        assert again.state.train.epoch == 2 and again.results.keys() == {1, 2}


class Adding(TracingRunner):
    figure: Any = None

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        return {**super().summarize(split, totals), "mine": self.figure}


NUMBERS = [1.5, np.float32(1.5), np.array(1.5), torch.tensor(1.5), torch.tensor([1.5], requires_grad=True), Fraction(3, 2)]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_a_figure_of_any_numeric_kind_is_a_float(number: Any) -> None:
    with Adding(CONFIG) as runner:
        runner.figure = number
        runner.meters.update({"metered": number})
        assert runner.meters.state_dict() == {"metered": [1.5, 1.0]}
        runner.train()
        assert (
            type(runner.results[1]["val"]["mine"]) is float
            and runner.results[1]["train"]["metered"] == 1.5
        )
    with Adding({**CONFIG, "auto_resume": True}) as again:
        assert again.results[2]["val"]["mine"] == 1.5


@pytest.mark.parametrize(
    "odd", [None, "1.5", {"a": 1.0}, torch.ones(2), np.ones(2), torch.tensor(1j)], ids=repr
)
def test_figure_other_than_a_number_is_named(odd: Any) -> None:
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


def test_a_meter_cannot_change_the_loss() -> None:
    with MeteringLoss(CONFIG) as runner:
        with pytest.raises(ValueError, match="'loss', which the runner computes itself"):
            runner.train()
        runner.where = "evaluate"
        with pytest.raises(ValueError, match="'loss', which the runner computes itself"):
            runner.evaluate("val")
        runner.where = "nowhere"
        assert set(runner.evaluate("val")["val"]) >= {"loss", "own"}


def test_each_of_two_open_runners_has_a_log_of_its_own() -> None:
    with (
        TracingRunner({**CONFIG, "dir": "first"}) as first,
        TracingRunner({**CONFIG, "dir": "second"}) as second,
    ):
        first.train()
        second.train()
        texts = [runner.workspace.log_file.read_text() for runner in (first, second)]
    assert (
        [text.count("Training from") for text in texts]
        == [text.count("Finished") for text in texts]
        == [1, 1]
    )


class Notes:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(values)))
        self.calls.append("log")

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_a_tracker_of_ones_own_gets_every_figure_in_every_training() -> None:
    notes = Notes()
    with Line({**CONFIG, "log_interval": 1}) as runner:
        runner.add_tracker(notes)
        runner.train()
        first = len(notes.lines)
        runner.config.epochs = 3
        runner.train()
        assert (
            len(notes.lines) > first and "close" not in notes.calls and notes.calls[-1] == "flush"
        )
    written = read_jsonl("run/metrics.jsonl")
    assert [(line.pop("step"), line.pop("time") and line) for line in written] == notes.lines
    assert notes.calls.count("close") == 1 and notes.calls[-1] == "close"


class Failing(Line):
    def optimizer_step(self) -> None:
        if self.train_state.global_step == 2:
            raise RuntimeError("no further")
        super().optimizer_step()


def test_a_tracker_is_flushed_and_closed_after_a_failure() -> None:
    notes = Notes()
    with (
        pytest.raises(RuntimeError, match="no further"),
        Failing({**CONFIG, "log_interval": 1}) as runner,
    ):
        runner.add_tracker(notes)
        runner.train()
    assert len(notes.lines) == 2 and notes.calls[-2:] == ["flush", "close"]


def test_object_without_a_tracker_interface_or_added_twice_is_refused() -> None:
    with Line(CONFIG) as runner:
        with pytest.raises(TypeError, match=r"without log, flush, close"):
            runner.add_tracker({"loss": 1.0})  # type: ignore[arg-type]
        runner.add_tracker(Notes)
        with pytest.raises(ValueError, match=r"twice"):
            runner.add_tracker(Notes)


def trackers_of_ranks(config: dict[str, Any]) -> tuple[int, list[str]]:
    own = Notes()
    Notes.made = 0
    with Line(config) as runner:
        runner.add_tracker(own)
        runner.add_tracker(Notes)
        runner.train()
    return Notes.made, own.calls


def test_main_process_alone_uses_trackers_and_all_close_their_own() -> None:
    (made, calls), (other_made, other_calls) = run_processes(
        trackers_of_ranks, CONFIG, world_size=2
    )
    assert made == 1 and "log" in calls and calls[-1] == "close"
    assert other_made == 0 and other_calls == ["close"]


def test_trackers_are_closed_while_the_run_has_its_log_and_its_directory() -> None:
    class Sent(Notes):
        def close(self) -> None:
            assert Path("run/.lock").exists()
            logging.getLogger("danling").info("%d figures were sent.", len(self.lines))

    with Line(CONFIG) as runner:
        runner.add_tracker(Sent())
        runner.train()
    assert "figures were sent." in runner.workspace.log_file.read_text()


def beat_of(run: str) -> dict[str, Any]:
    beat: dict[str, Any] = json.loads(Path(run, "heartbeats", "rank-0.json").read_text())
    return beat


class Looking(Line):
    """Looks at the heartbeat before it builds its model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = beat_of("run")


def test_the_heartbeat_begins_before_the_model_is_built_and_counts_the_last_epoch() -> None:
    with Looking({**CONFIG, "heartbeat": {"enabled": True}}) as runner:
        assert runner.seen["status"] == "running" and runner.seen["last_step_time"] is None
        runner.train()
    last = beat_of("run")
    assert (last["status"], last["global_step"], last["epoch"]) == ("stopped", 8, 2)


class Moving(Line):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.dir = "other"


def test_the_heartbeat_follows_the_directory() -> None:
    with Moving({**CONFIG, "heartbeat": {"enabled": True}}):
        assert beat_of("other")["status"] == "running"
    assert beat_of("run")["status"] == "stopped"


class Diverged(Line):
    def compute_loss(self, pred: Any, target: Any) -> Any:
        return super().compute_loss(pred, target) * torch.nan


def test_skipped_updates_are_steps_for_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = {
        "heartbeat": {"enabled": True},
        "gc": {"interval": 1},
        "epochs": 1,
        "skip_nonfinite_grad": True,
    }
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
