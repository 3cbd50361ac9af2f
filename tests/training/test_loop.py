"""The loops by themselves: what is trained, evaluated and saved, in which order, without a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.keys import own_keys

from danling.metrics import ScoreBoard
from danling.reporting import Reporter
from danling.training import Boundaries, EvaluationStopped, TrainingSession, UpdateOutcome
from danling.training.loop import TrainingLoop
from danling.training.results import BoundarySchedule, RunResults, ScoreFacts


@dataclass
class Counted:
    """Progress, as a runner has it."""

    global_step: int = 0
    epoch: int = 0


class Passes:
    """A split of so many updates a pass, which remembers where it stands."""

    def __init__(self, updates: int) -> None:
        self.updates, self.done, self.epoch = updates, 0, 0

    def finish_pass(self) -> None:
        self.done, self.epoch = 0, self.epoch + 1


class Told:
    """A run that writes down what its loop asks of it; `at` maps an event to what happens then."""

    def __init__(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        splits: dict[str, int] | None = None,
        every: dict[str, int] | None = None,
        at: dict[str, Callable[[], Any]] | None = None,
        board: ScoreBoard | None = None,
        skipped: tuple[int, ...] = (),
    ) -> None:
        self.events: list[str] = []
        self.counters, self.session = Counted(), TrainingSession()
        self.passes = {split: Passes(updates) for split, updates in (splits or {"train": 3}).items()}
        self.recorded: dict[int, dict[str, dict[str, float]]] = {}
        self.state = SimpleNamespace(train=self.counters)
        self.steps, self.epochs, self.at, self.skipped, self.made = steps, epochs, at or {}, skipped, 0
        facts = ScoreFacts(
            board=lambda: board,
            scores=lambda: board.scores if board is not None else {},
            best_score=lambda: None,
            best_index=lambda: None,
            is_best=lambda: False,
            since_best=lambda: 0,
            patience=lambda: float("inf"),
        )
        schedule = BoundarySchedule(
            lambda: None,
            by_updates=lambda: False,
            interval=lambda: "step",
            monitor=lambda: None,
            scored=lambda: "val.loss",
            facts=facts,
            index=lambda: self.index,
        )
        self.open_results = RunResults(
            self,
            facts=facts,
            schedule=schedule,
            session=self.session,
            write=lambda: self.note("write"),
            report=lambda metrics: self.note(f"report {'+'.join(metrics)}"),
        )
        self.loop = TrainingLoop(
            self,  # type: ignore[arg-type]
            keys=own_keys(self.session),
            updates=self.updates,
            pass_is_over=lambda split: self.passes[split].done == self.passes[split].updates,
            session=self.session,
            results=self.open_results,
            reporter=Reporter(is_main=False, world_size=1, seconds_between_lines=0),
            save_if_failing=lambda: lambda: self.note("kept") is None,
            trained_metrics=lambda: {"loss": float(self.counters.global_step)},
            first_update=lambda: self.note("first"),
            log_update=lambda outcome: self.note("log"),
        )
        options = {"log_every": 100, "evaluate_every": 4, "checkpoint_every": 1, **(every or {})}
        self.loop.boundaries = Boundaries(
            **options, save=lambda **given: self.note(f"due {self.index}"), is_best=lambda index: False
        )

    @property
    def results(self) -> dict[int, dict[str, dict[str, float]]]:
        return self.recorded

    @property
    def is_step_mode(self) -> bool:
        return self.epochs is None

    def train_epoch(self, split: str) -> dict[str, float]:
        return self.loop.train_epoch(split)

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        return self.evaluate(f"evaluate {split}")

    def evaluate_steps(self, split: str) -> dict[str, float]:
        return self.evaluate(f"evaluate steps {split}")

    def source(self, split: str) -> Passes:
        return self.passes[split]

    def save_checkpoint(self) -> None:
        self.note("save")

    @property
    def index(self) -> int:
        return self.counters.global_step if self.epochs is None else self.counters.epoch

    def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.at:
            self.at[event]()

    def evaluate(self, event: str) -> dict[str, float]:
        self.note(event)
        return {"loss": 0.5}

    def updates(self, split: str) -> Iterator[UpdateOutcome]:
        source = self.passes[split]
        while source.done < source.updates:
            source.done += 1
            self.made += 1
            committed = self.made not in self.skipped
            self.counters.global_step += committed
            self.note(f"{split} {self.made}")
            yield UpdateOutcome(committed, 1.0, 1.0, 1.0)


def test_an_epoch_is_trained_evaluated_recorded_and_saved_in_this_order() -> None:
    told = Told(epochs=2, splits={"train": 2})
    told.loop.train_epochs(["train"], ["val"])
    first = ["train 1", "first", "train 2", "evaluate val", "write", "report train+val", "due 1"]
    assert told.events == [*first, "train 3", "train 4", "evaluate val", "write", "report train+val", "due 2"]
    assert told.recorded == {
        1: {"train": {"loss": 2.0}, "val": {"loss": 0.5}},
        2: {"train": {"loss": 4.0}, "val": {"loss": 0.5}},
    }
    assert told.passes["train"].epoch == 2 and told.loop.is_done()


def test_update_by_update_evaluations_lie_within_passes_and_the_end_is_one() -> None:
    told = Told(steps=7, splits={"train": 3}, every={"evaluate_every": 4, "checkpoint_every": 2})
    told.loop.train_steps(["train"], ["val"])
    assert [event for event in told.events if event.startswith(("due", "evaluate"))] == [
        "due 2",
        "evaluate steps val",
        "due 4",
        "due 6",
        "evaluate steps val",
        "due 7",
    ]
    assert told.recorded.keys() == {4, 7} and told.counters == Counted(7, 2) and told.passes["train"].done == 1


def test_a_skipped_update_is_no_boundary() -> None:
    told = Told(steps=2, skipped=(1, 3), every={"evaluate_every": 1, "log_every": 1})
    told.loop.train_steps(["train"], [])
    assert told.events == [
        *("train 1", "train 2", "first", "log", "write", "report train", "due 1"),
        *("train 3", "train 4", "log", "write", "report train", "due 2"),
    ]


def test_a_stop_leaves_the_pass_and_records_nothing() -> None:
    told = Told(epochs=2, at={"train 2": lambda: setattr(told.session, "stop_reason", "stop")})
    told.loop.train_epochs(["train"], ["val"])
    assert told.events == ["train 1", "first", "train 2"] and not told.recorded and not told.open_results.open
    assert told.counters == Counted(2, 0) and told.passes["train"].done == 2


def test_a_checkpoint_that_was_asked_for_waits_for_an_evaluation_that_is_due() -> None:
    def ask() -> None:
        told.session.save_requested = True

    told = Told(steps=4, at={"train 1": ask, "train 4": ask}, every={"evaluate_every": 4, "checkpoint_every": 100})
    told.loop.train_steps(["train"], ["val"])
    kept = [event for event in told.events if event.startswith(("save", "evaluate", "due", "train"))]
    assert kept == ["train 1", "save", "train 2", "train 3", "train 4", "evaluate steps val", "due 4"]
    assert not told.session.save_requested


def test_a_failing_evaluation_is_kept_and_one_that_is_left_is_not(caplog: pytest.LogCaptureFixture) -> None:
    for error, kept in ((RuntimeError("broken"), True), (EvaluationStopped(), False)):

        def fail(error: Exception = error) -> None:
            raise error

        told = Told(epochs=1, at={"evaluate val": fail})
        with pytest.raises(type(error)):
            told.loop.train_epochs(["train"], ["val"])
        assert ("kept" in told.events) is kept
        # A run that goes on begins with this evaluation: the pass is not trained again.
        told.at.clear()
        made = told.made
        told.loop.train_epochs(["train"], ["val"])
        assert told.made == made and told.recorded.keys() == {1}


def test_metrics_without_the_score_are_refused_before_anything_is_counted() -> None:
    told = Told(epochs=1, board=ScoreBoard("accuracy", split="val"))
    with pytest.raises(ValueError, match="accuracy"):
        told.loop.train_epochs(["train"], ["val"])
    assert not told.recorded and told.counters.epoch == 0


def test_a_budget_that_shrinks_ends_the_run_where_it_is() -> None:
    told = Told(steps=10, at={"train 2": lambda: setattr(told, "steps", 2)}, every={"evaluate_every": 100})
    told.loop.train_steps(["train"], [])
    assert told.counters.global_step == 2 and told.recorded.keys() == {2}


@pytest.mark.parametrize("evaluate_every", [3, 5, 100])
def test_data_that_ends_before_the_budget_ends_the_run_with_an_evaluation_and_a_save(evaluate_every: int) -> None:
    told = Told(steps=9, splits={"train": 3}, every={"evaluate_every": evaluate_every, "checkpoint_every": 100})
    updates = told.updates

    def over(split: str) -> Iterator[UpdateOutcome]:
        if told.passes[split].epoch:
            told.session.leave_pass()
        yield from updates(split)

    told.session.running = True
    told.loop._updates = over
    told.loop.train_steps(["train"], ["val"])
    made = ["evaluate steps val", "write", "report train+val"]
    assert told.events == ["train 1", "first", "train 2", "train 3", *made, *(["due 3"] if evaluate_every != 3 else [])]
    assert told.recorded == {3: {"train": {"loss": 3.0}, "val": {"loss": 0.5}}} and told.loop.data_ended
    told.loop.train_steps(["train"], ["val"])
    assert told.recorded.keys() == {3} and told.events.count("evaluate steps val") == 1


def test_a_pass_that_is_trained_alone_closes_the_epoch_with_the_last_split() -> None:
    told = Told(epochs=3, splits={"train": 1, "train_b": 1, "extra": 1})
    trained = ["train", "train_b"]
    for split, epoch in (("extra", 0), ("train", 0), ("train_b", 1)):
        metrics = told.loop.train_epoch_alone(split, lambda split=split: told.loop.train_epoch(split), trained)
        assert metrics.keys() == {"loss"} and told.counters.epoch == epoch and told.passes["extra"].epoch == 1
    assert told.recorded.keys() == {1} and told.recorded[1].keys() == set(trained)


def test_a_state_of_another_pass_sends_the_loops_back_to_it() -> None:
    def jump() -> None:
        told.counters.epoch = 1
        assert told.loop.jumps_out_of("train") is False  # not trained yet in that epoch
        told.open_results.open["train"] = {"loss": 9.0}
        assert told.loop.jumps_out_of("train")

    told = Told(epochs=2, at={"train 2": jump})
    told.loop.train_epochs(["train"], [])
    # What was trained of the first pass is no epoch; the second one was trained elsewhere.
    assert told.recorded == {2: {"train": {"loss": 9.0}}}
