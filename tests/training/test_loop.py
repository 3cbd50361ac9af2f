"""A training from its beginning to its end: what is trained, evaluated and saved, in which order, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from danling import TorchRunner
from danling.distributed.step_sync import REQUESTS, HostCopy
from danling.training.session import (
    DataEnded,
    EvaluationStopped,
    IntactStateError,
    TrainingAbandoned,
)


class Told(TorchRunner):
    """Writes down what its loop asks of it; `at` maps an event to what happens then. An update on NaN is skipped."""

    def __init__(
        self, directory: Path, *splits: int, at: Any = None, data: Any = None, **settings: Any
    ) -> None:
        self_settings = {
            "seed": 1,
            "log": False,
            "try_evaluation": False,
            "skip_nonfinite_grad": True,
            **settings,
        }
        super().__init__(
            {
                "dir": directory,
                "dataloader": {"batch_size": 1, "shuffle": False},
                "checkpoint.async_enabled": False,
                **self_settings,
            }
        )
        self.model, self.criterion = nn.Linear(1, 1), nn.L1Loss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        names = ["train", "train_b", "train_c"]
        self.datasets = {
            split: [(torch.ones(1), torch.ones(1))] * n for split, n in zip(names, splits or (3,))
        }
        if data is not None:
            self.datasets["train"] = [(torch.tensor([value]), torch.ones(1)) for value in data]
        self.dataloaders["val"] = [(torch.ones(1, 1), torch.ones(1, 1))]
        self.at: dict[str, Callable[[], Any]] = at or {}
        self.events: list[str] = []

    def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.at:
            self.at[event]()

    def step(self) -> Any:
        outcome = super().step()
        self.note(f"update {self.state.train.global_step}" if outcome.committed else "skipped")
        return outcome

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        self.note(f"evaluate {split}")
        return super().evaluate_epoch(split)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        self.note(f"evaluate {split}")
        return super().evaluate_steps(split, steps)

    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        self.note("history" if history else "save")
        super().save_checkpoint(history=history, save_best=save_best)


def updates(first: int, last: int) -> list[str]:
    return [f"update {step}" for step in range(first, last + 1)]


@pytest.mark.parametrize(
    ("settings", "events", "recorded"),
    [
        (
            {"epochs": 2},
            [*updates(1, 3), "evaluate val", "history", *updates(4, 6), "evaluate val", "history"],
            [1, 2],
        ),
        (
            {"steps": 7, "evaluate_interval": 4, "checkpoint.interval": 2, "min_delta": 9.0},
            [
                *(*updates(1, 2), "history", *updates(3, 4), "evaluate val", "history"),
                *(*updates(5, 6), "history", "update 7", "evaluate val", "save"),
            ],
            [4, 7],
        ),
        # Without a periodic save, the first evaluation is the best one so far, and the last update is saved.
        (
            {"steps": 5, "evaluate_interval": 2, "checkpoint.interval": 100, "min_delta": 9.0},
            [
                *updates(1, 2),
                "evaluate val",
                "save",
                *updates(3, 4),
                "evaluate val",
                "update 5",
                "evaluate val",
                "save",
            ],
            [2, 4, 5],
        ),
    ],
)
def test_order_of_training_evaluation_and_saves(
    settings: dict[str, Any], events: list[str], recorded: list[int], tmp_path: Path
) -> None:
    with Told(tmp_path, **settings) as run:
        run.train()
        assert run.events == events and list(run.results) == recorded and run.progress == 1
        assert run.results[recorded[-1]].keys() == {"train", "val"}
        run.train()  # nothing is left
        assert run.events == events


def test_a_skipped_update_is_no_boundary(tmp_path: Path) -> None:
    nan = float("nan")
    with Told(
        tmp_path, data=(nan, 1.0, nan, 1.0), steps=2, evaluate_interval=1, min_delta=9.0
    ) as run:
        run.train()
        first, second = (
            ["skipped", "update 1", "evaluate val", "history"],
            ["skipped", "update 2", "evaluate val"],
        )
        assert run.events == [*first, *second, "history"]
        assert run.state.train.skipped_updates == 2


def test_a_stop_leaves_the_pass_records_nothing_and_is_saved(tmp_path: Path) -> None:
    settings = {"epochs": 2, "checkpoint": {"async_enabled": False, "last_save_model_only": True}}
    with Told(tmp_path, at={"update 2": lambda: run.stop()}, **settings) as run:
        run.train()
        # The request is applied at the boundary of the next update.
        assert (
            run.events == [*updates(1, 3), "save"]
            and not run.results
            and run.state.train.epoch == 0
        )
        assert not list(tmp_path.rglob("model*"))  # only a run that is complete is exported
        run.at.clear()
        run.train()
        assert list(run.results) == [1, 2] and list(tmp_path.rglob("model*"))


def test_pending_requests_of_the_device_at_a_stop_are_not_left_to_the_next_training(
    tmp_path: Path,
) -> None:
    runner = Told(tmp_path, epochs=2)
    sync = runner._parts.update.sync
    asked = torch.tensor([float(name == "stop") for name in REQUESTS], dtype=torch.float64)

    def on_device() -> None:
        sync._in_flight = HostCopy(asked)

    runner.at = {"update 1": runner.stop, "update 2": on_device}
    with runner:
        runner.train()
        assert (runner.state.train.global_step, sync.take_pending_requests()) == (2, frozenset())


def test_requested_checkpoint_waits_for_a_due_evaluation(tmp_path: Path) -> None:
    def ask() -> None:
        run.request_checkpoint()

    settings: Any = {
        "steps": 5,
        "evaluate_interval": 4,
        "checkpoint.interval": 100,
        "min_delta": 9.0,
    }
    with Told(tmp_path, at={"update 1": ask, "update 3": ask}, **settings) as run:
        run.train()
        first = ["update 1", "update 2", "save", "update 3", "update 4", "evaluate val", "save"]
        assert run.events == [*first, "update 5", "evaluate val", "save"]


class Ending:
    def __init__(self, run: Told) -> None:
        self.run, self.passes = run, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.passes > 1:
            raise DataEnded
        return iter([(torch.ones(1, 1), torch.ones(1, 1))] * 3)


@pytest.mark.parametrize("evaluate_interval", [3, 100])
def test_data_shorter_than_the_budget_ends_the_run_with_an_evaluation_and_a_save(
    evaluate_interval: int, tmp_path: Path
) -> None:
    settings: Any = {"steps": 9, "evaluate_interval": evaluate_interval, "checkpoint.interval": 100}
    with Told(tmp_path, **settings) as run:
        del run.datasets["train"]
        run.dataloaders["train"] = Ending(run)
        run.train()
        # Where the pass is counted after the evaluation, that is saved too.
        saves = ["save"] * (2 if evaluate_interval == 3 else 1)
        assert run.events == [*updates(1, 3), "evaluate val", *saves] and list(run.results) == [3]
        run.train()
        assert run.events.count("evaluate val") == 1


# The end


class Lost(IntactStateError):
    """The others are lost."""


@pytest.mark.parametrize("fails", [False, True])
def test_failure_with_a_whole_state_is_saved_before_it_is_raised(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lose() -> None:
        if fails:
            run.save_checkpoint = fail  # type: ignore[method-assign]
        raise Lost("gone")

    def fail(**options: Any) -> None:
        raise OSError("no space left")

    with Told(
        tmp_path, at={"evaluate val": lose}, epochs=2, **{"checkpoint.before_evaluation": False}
    ) as run:
        with pytest.raises(Lost):
            run.train()
        assert ("That save failed" in caplog.text) is fails
        assert (run.saver.saved_at == (3, 0, 3)) is not fails


@pytest.mark.parametrize(
    ("error", "reason"), [(EvaluationStopped(), None), (TrainingAbandoned(), "stop")]
)
def test_interrupted_evaluations_and_waits_end_like_others(
    error: Exception, reason: str | None, tmp_path: Path
) -> None:
    def leave() -> None:
        if reason is not None:
            run.stop()
        raise error

    with Told(tmp_path, at={"evaluate val": leave}, epochs=2) as run:
        run.train()
        assert run._parts.session.stop_reason == reason and run.events[-2:] == [
            "evaluate val",
            "save",
        ]
        # It is made anew: the pass is not trained again.
        run.at.clear()
        run.train()
        assert run.events[5:7] == ["evaluate val", "history"] and run.state.train.global_step == 6


def test_late_signal_reaches_the_program(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with Told(tmp_path, epochs=1) as run:
            end = run._parts.reporter.end

            def late() -> None:
                signal.raise_signal(signal.SIGUSR1)
                end()

            run._parts.reporter.end = late  # type: ignore[method-assign]
            run.train()
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
