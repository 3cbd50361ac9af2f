"""Observers: told of each event in order; one that fails is dropped, one that is critical ends the training."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling import TorchRunner
from danling.utils.observers import Observer


class Program(TorchRunner):
    def __init__(self, directory: Path, **settings: Any) -> None:
        given = {
            "accum_steps": 2,
            "dir": directory,
            "log": False,
            "optim.type": "sgd",
            "seed": 1,
            **settings,
        }
        super().__init__({"steps": 2, **given} if "epochs" not in settings else given)
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()
        self.datasets = {"train": [(torch.ones(2), torch.ones(1))] * 4}


class Recording(Observer):
    def __init__(self, name: str, seen: list[Any], runner: TorchRunner) -> None:
        self.name, self.seen, self.runner = name, seen, runner

    def gradients_ready(self, totals: object, norm: Tensor) -> None:
        grads = [p.grad for p in self.runner.unwrapped_model.parameters() if p.grad is not None]
        assert torch.allclose(
            norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
        )
        self.seen.append((self.name, "gradients_ready"))

    def update_ended(self, outcome: Any) -> None:
        assert outcome.committed
        self.seen.append((self.name, self.runner.state.train.global_step))


def _noting(event: str) -> Any:
    def note(self: Recording, *args: Any, **named: Any) -> None:
        assert all(named[key] is not None for key in named)
        self.seen.append((self.name, event))

    return note


for _event in [
    name for name in vars(Observer) if name.endswith(("_started", "_ended", "_failed", "_needed"))
]:
    if _event not in vars(Recording):
        setattr(Recording, _event, _noting(_event))

WAIT = ["batch_wait_started", "batch_wait_ended"]
MICRO = ["micro_batch_started", "micro_batch_ended"]
# The loop reads one micro-batch ahead.
UPDATE = [*WAIT, *WAIT, "update_started", *MICRO, *MICRO, "gradients_ready"]


def test_events_come_in_the_order_of_the_list(tmp_path: Path) -> None:
    seen: list[Any] = []
    with Program(
        tmp_path, epochs=1, **{"dataloader.batch_size": 1, "try_evaluation": False}
    ) as runner:
        runner.dataloaders["val"] = [(torch.ones(1, 2), torch.ones(1, 1))]
        runner.observers.extend([Recording("a", seen, runner), Recording("b", seen, runner)])
        runner.train()
        assert seen[-2:] == [("a", "training_ended"), ("b", "training_ended")]
    events = ["training_started", "pass_started", *UPDATE, 1, *UPDATE, 2, *WAIT, "pass_ended"]
    events += [
        "evaluation_started",
        "evaluation_batch_started",
        "evaluation_ended",
        "save_started",
        "save_ended",
        "training_ended",
    ]
    told = [(name, event) for name, event in seen if event != "results_needed"]
    assert told == [(name, event) for event in events for name in ("a", "b")]
    # Nothing is postponed any more when the evaluation begins.
    assert seen.index(("b", "results_needed")) < seen.index(("a", "evaluation_started"))


def test_a_loop_by_hand_is_one_training(tmp_path: Path) -> None:
    seen: list[Any] = []
    runner = Program(tmp_path)
    runner.observers.append(Recording("a", seen, runner))
    batch = torch.ones(1, 2), torch.ones(1, 1)
    for _ in range(2):
        runner.train_step(batch)
        runner.step()
    runner.close()
    update = ["update_started", *MICRO, "gradients_ready"]
    assert [event for _, event in seen] == [
        "training_started",
        *update,
        1,
        *update,
        2,
        "training_ended",
    ]


class Failing(Observer):
    def update_ended(self, outcome: Any) -> None:
        raise OSError("no space left")


class Critical(Failing):
    critical = True


def test_failing_observer_is_logged_once_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "danling")
    with Program(tmp_path) as runner:
        failing = Failing()
        runner.observers.append(failing)
        runner.train()
        assert runner.state.train.global_step == 2 and failing not in runner.observers
    assert caplog.text.count("The observer Failing failed and is dropped") == 1


def test_critical_observer_ends_the_training(tmp_path: Path) -> None:
    with Program(tmp_path) as runner:
        runner.observers.append(Critical())
        with pytest.raises(OSError, match="no space left"):
            runner.train()
        assert runner.state.train.global_step == 1


@pytest.mark.parametrize("when", ["before it is appended", "after it is appended"])
def test_event_in_an_attribute_of_an_observer_is_called(when: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    with Program(tmp_path) as runner:
        observer: Any = Observer()
        if when == "before it is appended":
            observer.update_ended = seen.append
        runner.observers.append(observer)
        observer.update_ended = seen.append
        runner.train()
    assert [outcome.committed for outcome in seen] == [True, True]


def test_event_of_a_class_that_is_replaced_before_a_training_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    with Program(tmp_path) as runner:
        runner.observers.append(Failing())
        monkeypatch.setattr(Failing, "update_ended", lambda self, outcome: seen.append(outcome))
        runner.train()
    assert len(seen) == 2


@dataclass
class Equal(Observer):
    """One is equal to any other."""

    def __post_init__(self) -> None:
        self.updates = 0
        self.fails = False

    def update_ended(self, outcome: Any) -> None:
        self.updates += 1
        if self.fails:
            raise OSError("no space left")


def test_observer_that_fails_is_dropped_and_not_one_that_is_equal(tmp_path: Path) -> None:
    first, second = Equal(), Equal()
    second.fails = True
    with Program(tmp_path) as runner:
        runner.observers.extend([first, second])
        runner.train()
        assert any(each is first for each in runner.observers)
        assert not any(each is second for each in runner.observers)
    assert (first.updates, second.updates) == (2, 1)


@pytest.mark.parametrize(("event", "others"), [("update_started", 0), ("update_ended", 1)])
def test_others_hear_of_an_end_at_which_an_observer_leaves(
    event: str, others: int, tmp_path: Path
) -> None:
    heard: list[object] = []

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    first, second = Observer(), Observer()
    setattr(first, event, leave)
    setattr(second, event, lambda *args: heard.append(args))
    with Program(tmp_path) as runner:
        runner.observers.extend([first, second])
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    assert len(heard) == others


def test_all_that_leave_at_one_event_are_named(tmp_path: Path) -> None:
    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise SystemExit("enough")

    first, second = Observer(), Observer()
    vars(first)["update_ended"] = leave
    vars(second)["update_ended"] = stop
    with Program(tmp_path) as runner:
        runner.observers.extend([first, second])
        with pytest.raises(KeyboardInterrupt) as caught:
            runner.train()
    assert "Observer has then raised SystemExit: enough" in caught.value.__notes__


def test_object_that_is_no_observer_is_refused(tmp_path: Path) -> None:
    with (
        Program(tmp_path) as runner,
        pytest.raises(TypeError, match="Expected an Observer. Received: <object"),
    ):
        runner.observers.append(object())  # type: ignore[arg-type]
