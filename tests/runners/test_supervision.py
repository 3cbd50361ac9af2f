"""What watches a run: trackers of one's own, collections of garbage, heartbeats."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.reporting import read_jsonl


class Small(dl.Runner):
    """A linear model on a few points."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 1)
        self.criterion = nn.MSELoss()
        points = TensorDataset(torch.arange(12.0).view(6, 2) / 12, torch.ones(6, 1))
        self.datasets = {"train": points, "val": points}


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base = {"dir": str(root / "run"), "seed": 1, "epochs": 2, "log": False, "log_interval": 1}
    return {**base, "dataloader": {"batch_size": 2}, "optim": {"type": "sgd", "lr": 0.1}, **more}


# Trackers


class Notes:
    """A tracker that remembers what it was asked for."""

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


def test_a_tracker_of_ones_own_gets_every_figure_in_every_training(tmp_path: Path) -> None:
    notes = Notes()
    with Small(settings(tmp_path)) as runner:
        runner.add_tracker(notes)
        runner.train()
        first = len(notes.lines)
        runner.config.epochs = 3
        runner.train()
        assert len(notes.lines) > first and "close" not in notes.calls and notes.calls[-1] == "flush"
    written = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(line.pop("step"), line.pop("time") and line) for line in written] == notes.lines
    assert notes.calls.count("close") == 1 and notes.calls[-1] == "close"


class Failing(Small):
    """Fails in the third update."""

    def optimizer_step(self) -> None:
        if self.train_state.global_step == 2:
            raise RuntimeError("no further")
        super().optimizer_step()


def test_a_tracker_is_flushed_and_closed_after_a_failure(tmp_path: Path) -> None:
    notes = Notes()
    with pytest.raises(RuntimeError, match="no further"), Failing(settings(tmp_path)) as runner:
        runner.add_tracker(notes)
        runner.train()
    assert len(notes.lines) == 2 and notes.calls[-2:] == ["flush", "close"]


def test_what_is_no_tracker_or_there_already_is_refused(tmp_path: Path) -> None:
    with Small(settings(tmp_path)) as runner:
        with pytest.raises(TypeError, match=r"without log, flush, close"):
            runner.add_tracker({"loss": 1.0})  # type: ignore[arg-type]
        runner.add_tracker(Notes)
        with pytest.raises(ValueError, match=r"twice"):
            runner.add_tracker(Notes)


def trackers_of_ranks(config: dict[str, Any]) -> tuple[int, list[str]]:
    own = Notes()
    Notes.made = 0
    with Small(config) as runner:
        runner.add_tracker(own)
        runner.add_tracker(Notes)
        runner.train()
    return Notes.made, own.calls


def test_the_main_process_alone_uses_trackers_and_all_close_what_they_made(tmp_path: Path) -> None:
    (made, calls), (other_made, other_calls) = run_processes(trackers_of_ranks, settings(tmp_path), world_size=2)
    assert made == 1 and "log" in calls and calls[-1] == "close"
    assert other_made == 0 and other_calls == ["close"]


def test_trackers_are_closed_while_the_run_has_its_log_and_its_directory(tmp_path: Path) -> None:
    order: list[str] = []

    class Held(Small):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._closers.callback(order.append, "run directory")

    class Sent(Notes):
        def close(self) -> None:
            logging.getLogger("danling").info("%d figures were sent.", len(self.lines))
            order.append("tracker")

    with Held(settings(tmp_path, log=True)) as runner:
        runner.add_tracker(Sent())
        runner.train()
    assert order == ["tracker", "run directory"]
    assert "figures were sent." in runner.workspace.log_file.read_text()


# Garbage


# The heartbeat


class Looking(Small):
    """Looks at the heartbeat before it builds its model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = json.loads((self.workspace.dir / "heartbeats" / "rank-0.json").read_text())
        if self.config.get("elsewhere"):
            self.config.dir = self.config.elsewhere


def test_the_heartbeat_begins_before_the_model_is_built(tmp_path: Path) -> None:
    with Looking(settings(tmp_path, heartbeat={"enabled": True})) as runner:
        assert runner.seen["status"] == "running" and runner.seen["last_step_time"] is None


def test_the_heartbeat_follows_the_directory(tmp_path: Path) -> None:
    config = settings(tmp_path, heartbeat={"enabled": True}, elsewhere=str(tmp_path / "other"))
    with Looking(config):
        beat = json.loads((tmp_path / "other" / "heartbeats" / "rank-0.json").read_text())
        assert beat["status"] == "running"
    left = json.loads((tmp_path / "run" / "heartbeats" / "rank-0.json").read_text())
    assert left["status"] == "stopped"
