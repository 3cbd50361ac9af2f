"""What is due between updates, without a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from danling.training import (
    Boundaries,
    monitored_metric,
    patience_exhausted,
    schedule_advances,
    warning_of_score,
)


def boundaries(best: set[int] | None = None, **given: Any) -> tuple[Boundaries, list[bool]]:
    saves: list[bool] = []

    def save(*, history: bool = False) -> None:
        saves.append(history)

    options = {"log_every": 5, "evaluate_every": 4, "checkpoint_every": 3, **given}
    return Boundaries(**options, save=save, is_best=lambda index: index in (best or ())), saves


def test_lines_and_evaluations_are_due_at_their_intervals_and_an_evaluation_at_the_end() -> None:
    found, _ = boundaries()
    assert [step for step in range(1, 11) if found.log_due(step)] == [5, 10]
    assert [step for step in range(1, 11) if found.evaluation_due(step, final=step == 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if found.evaluation_due(step)] == [4, 8]


@pytest.mark.parametrize(
    ("index", "options", "saved"),
    [
        (3, {}, [True]),
        (4, {}, []),
        (4, {"final": True}, [False]),
        (6, {"final": True, "requested": True}, [True]),
        (4, {"requested": True}, [False]),
        (5, {}, [False]),  # the best evaluation so far
    ],
)
def test_a_checkpoint_is_saved_once_where_anything_asks_for_it(
    index: int, options: dict[str, bool], saved: list[bool]
) -> None:
    found, saves = boundaries({5})
    found.save_if_due(index, **options)
    assert saves == saved


def test_whether_an_evaluation_was_the_best_is_not_asked_where_a_save_is_due_anyway() -> None:
    saves: list[bool] = []

    def ask(index: int) -> bool:
        raise AssertionError("asked")

    found = Boundaries(
        log_every=1,
        evaluate_every=1,
        checkpoint_every=1,
        save=lambda *, history=False: saves.append(history),
        is_best=ask,
    )
    found.save_if_due(7)
    assert saves == [True]


@pytest.mark.parametrize(
    ("interval", "by_metric", "advances"),
    [
        ("epoch", False, {"epoch", "pass", "alone"}),
        ("epoch", True, {"epoch", "validation"}),
        ("validation", False, {"epoch", "validation", "pass"}),
        ("validation", True, {"epoch", "validation", "pass"}),
    ],
)
def test_a_schedule_advances_where_its_interval_ends_and_its_metric_is_known(
    interval: str, by_metric: bool, advances: set[str]
) -> None:
    every: tuple[Any, ...] = ("epoch", "validation", "pass", "alone")
    assert {b for b in every if schedule_advances(b, interval=interval, by_metric=by_metric)} == advances


def test_the_metric_of_a_schedule_is_found_by_split_and_name_or_those_that_are_there_are_named() -> None:
    result = {"val": {"loss": 0.5}, "test": {"a.b": 2.0}}
    assert monitored_metric(result, "val.loss") == 0.5 and monitored_metric(result, "test.a.b") == 2.0
    for path in ("val.accuracy", "dev.loss", "loss"):
        with pytest.raises(
            ValueError, match=rf"one of \['val.loss', 'test.a.b'\]. Received: scheduler.monitor='{path}'"
        ):
            monitored_metric(result, path)


def test_patience_counts_evaluations_without_a_better_score() -> None:
    assert [since for since in range(5) if patience_exhausted(since, 3)] == [3, 4]
    # Without any patience the first worse one ends the run, and no evaluation ends none.
    assert [since for since in range(3) if patience_exhausted(since, 0)] == [1, 2]
    assert not patience_exhausted(10**9, math.inf)


def test_a_score_that_is_not_finite_is_warned_of() -> None:
    assert warning_of_score("val.loss", 0.5, 3) is None
    assert "NaN is never the best" in str(warning_of_score("val.loss", math.nan, 3))
    infinite = str(warning_of_score("val.loss", math.inf, 3))
    assert "val.loss to be finite. Received: inf at 3. See" in infinite and "NaN" not in infinite
