"""What is made ready for an evaluation that fails."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from danling.training.run_state import RunSaver


class Kept:
    """A keeper over a manager that can do some of what managers can."""

    def __init__(self, *abilities: str, several: bool = True, ahead: bool = True, writes: bool = True) -> None:
        self.calls: list[Any] = []
        self.position = SimpleNamespace(global_step=3, epoch=1, attempted=3)
        manager = SimpleNamespace(wait=lambda: self.calls.append("wait"))
        if "alone" in abilities:
            manager.save_alone = lambda payload, **at: self.calls.append(("alone", payload, at)) is None
        if "ahead" in abilities:
            manager.save_ahead = lambda payload, **at: self.calls.append(("ahead", payload, at))
            manager.is_saved_ahead = lambda: True
        runner: Any = SimpleNamespace(
            checkpoint_manager=manager,
            state=SimpleNamespace(train=self.position),
            config=SimpleNamespace(checkpoint=SimpleNamespace(load_only=not writes, before_evaluation=ahead)),
            world_size=2 if several else 1,
            fault_tolerance=None,
            checkpoint_state=lambda: {"step": self.position.global_step},
            save_checkpoint=lambda *, save_best: self.calls.append("save"),
        )
        session: Any = SimpleNamespace(saving=nullcontext)
        self.saver = runner.saver = RunSaver(runner, session, [], None)
        self.saver.checks.append(lambda: self.calls.append("settle"))


AT = {"epoch": 1, "global_step": 3}


def test_rank_able_to_save_alone_gathers_the_state_before_the_evaluation() -> None:
    kept = Kept("alone", "ahead")
    save = kept.saver.make_ready()
    assert kept.calls == ["settle"]
    kept.position.global_step = 9
    assert save() and kept.calls == ["settle", ("alone", {"step": 3}, AT)]


def test_collective_save_is_made_ahead_unless_switched_off() -> None:
    kept = Kept("ahead")
    save = kept.saver.make_ready()
    assert kept.calls == ["settle", ("ahead", {"step": 3}, AT)] and save()
    without = Kept("ahead", ahead=False)
    save = without.saver.make_ready()
    assert without.calls == [] and save() and without.calls == ["save", "wait"]


def test_one_process_saves_after_the_failure() -> None:
    kept = Kept("alone", "ahead", several=False)
    save = kept.saver.make_ready()
    assert kept.calls == [] and save() and kept.calls == ["save", "wait"]


def test_saved_or_read_only_state_is_left_alone() -> None:
    kept = Kept("alone")
    kept.saver.saved_at = (*kept.saver.at, 3)
    assert kept.saver.make_ready()() is True and kept.calls == []
    looking = Kept("alone", writes=False)
    assert looking.saver.make_ready()() is False and looking.calls == []


@pytest.mark.parametrize(
    "error, level, words",
    [
        (ValueError("odd"), logging.ERROR, "failed with ValueError"),
        (SystemExit(), logging.WARNING, "was ended by SystemExit"),
    ],
)
def test_evaluation_ended_by_a_scheduler_has_not_failed(
    error: BaseException, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "danling")
    kept = Kept()
    kept.saver.saved_at = (*kept.saver.at, 3)
    with pytest.raises(type(error)), kept.saver.keeping_trained():
        raise error
    (record,) = caplog.records
    assert record.levelno == level and f"The evaluation after step 3 {words}" in record.getMessage()
