"""What is made ready for an evaluation that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from danling.training.saving import RunSaver


class Kept:
    """A saver over a manager that writes a gathered state on rank 0 alone, or before the evaluation, or can do neither."""

    def __init__(
        self, ability: str = "", *, several: bool = True, before: bool = True, writes: bool = True
    ) -> None:
        self.calls: list[Any] = []
        self.position = SimpleNamespace(global_step=3, epoch=1, attempted=3)
        manager = SimpleNamespace(wait=lambda: self.calls.append("wait"))
        if ability:
            manager.saves_on_main_only = ability == "main only"
            manager.prepare_emergency_save = self.prepare
        runner: Any = SimpleNamespace(
            checkpoint_manager=manager,
            state=SimpleNamespace(train=self.position),
            config=SimpleNamespace(
                checkpoint=SimpleNamespace(load_only=not writes, before_evaluation=before)
            ),
            world_size=2 if several else 1,
            fault_tolerance=None,
            checkpoint_state=lambda: {"step": self.position.global_step},
            save_checkpoint=lambda *, save_best: self.calls.append("save"),
        )
        session: Any = SimpleNamespace(saving=nullcontext)
        self.saver = runner.saver = RunSaver(runner, session, [], None)
        self.saver.checks.append(lambda: self.calls.append("settle"))

    def prepare(self, payload: dict[str, int], **at: int) -> Callable[[], bool]:
        self.calls.append((payload, at))
        return lambda: True


AT = {"epoch": 1, "global_step": 3}


@pytest.mark.parametrize("ability", ["main only", "before"])
def test_state_of_several_ranks_is_handed_over_before_the_evaluation(ability: str) -> None:
    kept = Kept(ability)
    save = kept.saver.prepare_emergency_save()
    kept.position.global_step = 9
    assert save() and kept.calls == ["settle", ({"step": 3}, AT)]


def test_save_before_each_evaluation_can_be_switched_off() -> None:
    without = Kept("before", before=False)
    save = without.saver.prepare_emergency_save()
    assert without.calls == [] and save() and without.calls == ["save", "wait"]


def test_one_process_saves_after_the_failure() -> None:
    kept = Kept("main only", several=False)
    save = kept.saver.prepare_emergency_save()
    assert kept.calls == [] and save() and kept.calls == ["save", "wait"]


def test_saved_or_read_only_state_is_left_alone() -> None:
    kept = Kept("main only")
    kept.saver.saved_at = (*kept.saver.at, 3)
    assert kept.saver.prepare_emergency_save()() is True and kept.calls == []
    looking = Kept("main only", writes=False)
    assert looking.saver.prepare_emergency_save()() is False and looking.calls == []


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
