"""The metrics of an epoch or an evaluation: collected by split, then recorded, with everything that follows from their score."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from danling.metrics import ScoreBoard
from danling.optim import needs_metric
from danling.optim.schedulers import advance_by_epoch

from .boundaries import Boundary, monitored_metric, patience_exhausted, schedule_advances, warning_of_score
from .session import TrainingSession

logger = logging.getLogger("danling")

SplitMetrics = dict[str, dict[str, float]]
"""Metrics by split."""


@dataclass(frozen=True)
class ScoreFacts:
    """What is known of the scores of a run, read anew each time, since a user may override it.

    Attributes:
        board: Returns what keeps the scores; `None` where nothing is scored.
        scores: Returns the scores by epoch or update.
        best_score: Returns the best one, `None` before the first.
        best_index: Returns its epoch or update.
        is_best: Returns whether the last one is the best.
        since_best: Returns the evaluations after the best one.
        patience: Returns how many of them are waited for.
        own: Whether the user makes scores of something else than the metric that is configured.
    """

    board: Callable[[], ScoreBoard | None]
    scores: Callable[[], Mapping[int, float]]
    best_score: Callable[[], float | None]
    best_index: Callable[[], int | None]
    is_best: Callable[[], bool]
    since_best: Callable[[], int]
    patience: Callable[[], float]
    own: bool = False

    def patience_exhausted(self) -> bool:
        """Whether the run is to stop, since its score has not become better for too long."""
        return patience_exhausted(self.since_best() if self.board() is not None else 0, self.patience())

    def is_best_at(self, index: int) -> bool:
        """Whether the last score is the best one and of this epoch or update."""
        return self.is_best() and next(reversed(dict(self.scores())), None) == index


class BoundarySchedule:
    """Advances a schedule that goes by epochs or validations."""

    def __init__(
        self,
        scheduler: Callable[[], Any],
        *,
        by_updates: Callable[[], bool],
        interval: Callable[[], str],
        monitor: Callable[[], str | None],
        scored: Callable[[], str],
        facts: ScoreFacts,
        index: Callable[[], int],
        epochs: Callable[[], int] = lambda: 0,
    ) -> None:
        self._scheduler = scheduler
        self._epochs = epochs
        self._by_updates = by_updates
        self._interval = interval
        self._monitor = monitor
        self._scored = scored
        self._facts = facts
        self._index = index

    def check(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Refuse metrics of an evaluation among which the one that is watched is not."""
        scheduler = self._scheduler()
        is_named = not self._facts.own or self._monitor() is not None
        if is_named and scheduler is not None and not self._by_updates() and needs_metric(scheduler):
            self._monitored(metrics)

    def advance(self, boundary: Boundary, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Advance the schedule where it is time to."""
        scheduler = self._scheduler()
        if scheduler is None or self._by_updates():
            return
        by_metric = needs_metric(scheduler)
        if not schedule_advances(boundary, interval=self._interval(), by_metric=by_metric):
            return
        if by_metric:
            scheduler.step(self._monitored(metrics))
        else:
            advance_by_epoch(scheduler, self._epochs())

    def end_pass(self) -> None:
        """Advance a schedule by epochs at the end of a pass of step mode."""
        if self._scheduler() is not None and self._interval() == "epoch":
            self.advance("pass", {})

    def _monitored(self, metrics: Mapping[str, Mapping[str, float]]) -> float:
        asked, scores = self._monitor(), self._facts.scores()
        if not asked and self._index() in scores:
            return scores[self._index()]
        return monitored_metric(metrics, str(asked or self._scored()))


class RecordedRun(Protocol):
    """What was recorded of a run, and where it stands now."""

    @property
    def results(self) -> MutableMapping[int, SplitMetrics]:
        """The results by epoch or update."""

    @property
    def index(self) -> int:
        """The epoch or update that results go under."""


class RunResults:
    """Metrics of the epoch or the evaluation that is under way, and their record."""

    def __init__(
        self,
        run: RecordedRun,
        *,
        facts: ScoreFacts,
        schedule: BoundarySchedule,
        session: TrainingSession,
        write: Callable[[], None],
        report: Callable[[SplitMetrics], None],
        speaks: bool = True,
    ) -> None:
        self.open: SplitMetrics = {}
        self.scored_at: int | None = None
        self.facts = facts
        self.schedule = schedule
        self._run = run
        self._session = session
        self._write = write
        self._report = report
        self._speaks = speaks
        self._has_warned = False

    def reopen(self, metrics: Mapping[str, dict[str, float]]) -> None:
        """Go on with the metrics of an epoch or an evaluation that was under way."""
        self.open = dict(metrics)

    def check_trial(self, split: str, metrics: Mapping[str, float], *, scored: bool) -> None:
        """Refuse a split whose first batch shows that its metrics lack the score."""
        board = self.facts.board()
        if board is None or board.split != split or self.facts.own:
            return
        if not (board.name == "loss" and scored):
            board.check({split: dict(metrics)})

    def check(self) -> None:
        """Refuse metrics without the score before anything is counted by them."""
        board = self.facts.board()
        if board is not None and board.split in self.open and not self.facts.own:
            board.check(self.open)
        self.schedule.check(self.open)

    def close(self, boundary: Boundary, *, step: int) -> None:
        """Record the metrics, and decide what follows from them; the same on all ranks."""
        result, self.open = self.open, {}
        index = self._run.index
        self._run.results[index] = result
        self.scored_at = step
        board = self.facts.board() if self._is_scored(index, result) else None
        if board is not None and board.split and (board.finds(result) or not self.facts.own):
            self._compare_samples(board, index)
            board.record(index, result)
            self._warn_of(board, index)
        self.schedule.advance(boundary, result)
        if board is not None and self.facts.patience_exhausted():
            self._stop_early()
        self._write()
        self._report(result)

    def has_best_at(self, index: int) -> bool:
        """Whether an epoch or update was recorded and has the best score so far."""
        return index in self._run.results and self.facts.is_best_at(index)

    def _is_scored(self, index: int, result: SplitMetrics) -> bool:
        board = self.facts.board()
        if board is None or board.split:
            return board is not None and board.split in result
        return index in self.facts.scores()

    def _warn_of(self, board: ScoreBoard, index: int) -> None:
        """Warn once of a score that is not finite."""
        if self._has_warned:
            return
        warning = warning_of_score(f"{board.split}.{board.name}", board.scores[index], index)
        self._has_warned = warning is not None
        if warning is not None and self._speaks:
            logger.warning("%s", warning)

    def _compare_samples(self, board: ScoreBoard, index: int) -> None:
        """Warn where a score is of another number of samples than the one before it, as after a resume with another batch size."""
        before = next(reversed([each for each in board.scores if each != index]), None)
        counts = [self._run.results.get(each or 0, {}).get(board.split, {}).get("samples") for each in (before, index)]
        if None not in counts and counts[0] != counts[1] and self._speaks:
            logger.warning(
                "The score %s.%s of step %d is of %.0f samples, that of step %d of %.0f: they are compared all the same. They are those of "
                "steps // 20 batches of each rank; keep `steps`, the batch size and the number of ranks, or override `evaluate_steps`.",
                board.split,
                board.name,
                index,
                counts[1],
                before,
                counts[0],
            )

    def _stop_early(self) -> None:
        self._session.stop_reason = "patience"
        best, waited = self.facts.best_score(), self.facts.since_best()
        if best is None:
            logger.info("Stopping early: no evaluation had a score that can be the best.")
        else:
            logger.info(
                "Stopping early: no better score than %.4g in %d evaluation%s.", best, waited, "s" * (waited != 1)
            )
