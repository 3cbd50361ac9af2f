"""G2: one rank of two is killed, or both, at random instants and around evaluations, their rows and saves: every row is there once.

`make chaos N=200 CHAOS=tests/guarantees/test_kill_ranks.py` kills that often; here it is a few times.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.chaos import SEED, report, share
from support.processes import run_outcomes, run_processes
from support.saves import litter, rows
from support.stacks import copied
from support.toys import TracingRunner, differences, whole_settings, whole_state

import danling as dl
from danling.cli.verify import verify
from danling.utils.observers import Observer

EVENTS = ("evaluation_started", "evaluation_ended", "save_started", "save_ended", "row")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"stack": "ddp"},
    "parallel": {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
}


@dataclass(frozen=True)
class Kill:
    """Which ranks are killed, at which occurrence of an event, or of the start without one, and how much later."""

    ranks: tuple[int, ...]
    event: str | None
    number: int
    seconds: float

    @classmethod
    def drawn(cls, choices: random.Random) -> Kill:
        ranks = choices.choice([(0,), (1,), (0, 1)])
        if choices.random() < 0.4:
            return cls(ranks, None, 0, choices.uniform(0.0, 1.5))
        return cls(
            ranks,
            choices.choice(EVENTS),
            choices.randrange(3),
            choices.choice([0.0, 0.001, 0.01, 0.05]),
        )


class Killer(Observer):
    """Kills this process at an event."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._seen = kill, 0

    def meet(self, event: str | None) -> None:
        if event != self._kill.event:
            return
        self._seen += 1
        if self._seen > self._kill.number or event is None:
            timer = threading.Timer(self._kill.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def evaluation_started(self, split: str) -> None:
        self.meet("evaluation_started")

    def evaluation_ended(self, split: str) -> None:
        self.meet("evaluation_ended")

    def save_started(self) -> None:
        self.meet("save_started")

    def save_ended(self) -> None:
        self.meet("save_ended")


class EvaluationRows:
    """A tracker that meets the killer when the row of an evaluation is logged."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def log(self, values: Mapping[str, float], step: int) -> None:
        if "val/loss" in values:
            self._killer.meet("row")

    def flush(self) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Keep nothing open."""


class Trained(TracingRunner, dl.Runner):
    """The small runner on any stack."""


def settings(root: Path, layout: str, mode: str) -> dict[str, Any]:
    policy = {"backend": "dcp", "async_mode": mode, "interval": 2, "keep_latest_k": 2}
    more = {
        "steps": 12,
        "evaluate_interval": 4,
        "log_interval": 1,
        "auto_resume": True,
        "checkpoint": policy,
    }
    return whole_settings(root, **LAYOUTS[layout], **more)


def train(config: dict[str, Any], kill: Kill | None = None) -> dict[str, Any]:
    with Trained(config) as runner:
        if kill is not None and runner.rank in kill.ranks:
            killer = Killer(kill)
            runner.observers.append(killer)
            runner.add_tracker(EvaluationRows(killer))
            killer.meet(None)
        runner.train()
        return copied(whole_state(runner))


def kill_until_the_end(make: Any, root: Path, choices: random.Random, kills: int) -> int:
    """Start a run again and again, killing it at most that often, until it ends; return how often it was killed."""
    done = 0
    while done < kills:
        outcomes = run_outcomes(train, make(root), Kill.drawn(choices), timeout=120)
        if all(outcome.error is None for outcome in outcomes):
            return done
        assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes), outcomes
        done += 1
    return done


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("part", "layout", "mode"),
    [
        (0.4, "ddp", "async"),
        pytest.param(0.2, "ddp", "disabled", marks=pytest.mark.slow),
        pytest.param(0.4, "parallel", "async", marks=pytest.mark.slow),
    ],
)
def test_every_row_is_there_once_after_kills_of_ranks(
    part: float, layout: str, mode: str, tmp_path: Path
) -> None:
    def make(root: Path) -> dict[str, Any]:
        return settings(root, layout, mode)

    what = f"one rank or both, around evaluations and saves: dcp, {layout}, {mode}, 2 processes"
    choices, kills, done = random.Random(f"{what} {SEED}"), share(part, otherwise=2), 0
    alone = run_processes(train, make(tmp_path / "alone"), timeout=120)
    (left_alone,) = (tmp_path / "alone").rglob("metrics.jsonl")
    while done < kills:
        root = tmp_path / "killed"
        killed = kill_until_the_end(make, root, choices, kills - done)
        # One that has ended is left as it is: a last start adds nothing to it.
        ended = run_processes(train, make(root), timeout=120)
        for own, expected in zip(ended, alone, strict=True):
            assert differences(own, expected) == []
        (file,) = root.rglob("metrics.jsonl")
        assert rows(file.parent) == rows(left_alone.parent)
        assert litter(root) == []
        (checkpoints,) = root.rglob("checkpoints")
        assert not [verdict for verdict in verify(checkpoints, "full") if verdict["problems"]]
        shutil.rmtree(root)
        report(what, killed, 1)
        done += killed
