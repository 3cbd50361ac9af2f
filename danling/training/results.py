"""The metrics of an epoch or an evaluation: collected by split, then recorded, with everything that follows from their score."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from danling.metrics import ScoreBoard
from danling.optim import needs_metric
from danling.optim.registry import advance_by_epoch

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

Boundary = Literal["epoch", "validation", "pass", "alone"]
"""The end of an epoch, a validation of step mode, the end of a pass of step mode, or the end of an epoch that the user trains directly,
without an evaluation."""


class RunResults:
    """Metrics of the epoch or the evaluation that is under way, and their record.

    Attributes:
        open: Metrics by split that are not recorded yet.
        scored_at: Updates committed at the last record.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.open: dict[str, dict[str, float]] = {}
        self.scored_at: int | None = None
        self._runner = runner
        self._has_warned = False

    def check_trial(self, split: str, metrics: Mapping[str, float], *, scored: bool) -> None:
        """Refuse a split whose first batch shows that its metrics lack the score."""
        standing = self._runner.standing
        board = standing.board
        if board is None or board.split != split or standing.own or (board.name == "loss" and scored):
            return
        board.check({split: dict(metrics)})

    def check(self) -> None:
        """Refuse metrics without the score, or without the metric of the schedule, before anything is counted by them."""
        standing, scheduler = self._runner.standing, self._runner.scheduler
        if standing.board is not None and standing.board.split in self.open and not standing.own:
            standing.board.check(self.open)
        is_named = not standing.own or self._monitor() is not None
        if is_named and scheduler is not None and not self._by_updates() and needs_metric(scheduler):
            self._monitored(self.open)

    def close(self, boundary: Boundary) -> None:
        """Record the metrics, and do what follows from them; the same on all ranks."""
        runner, standing = self._runner, self._runner.standing
        result, self.open = self.open, {}
        index, self.scored_at = runner.index, runner.state.train.global_step
        runner.results[index] = result
        board = standing.board
        if board is not None and not (board.split in result if board.split else index in standing.scores):
            board = None
        if board is not None and board.split and (board.finds(result) or not standing.own):
            self._compare_samples(board, index)
            board.record(index, result)
            score = board.scores[index]
            if not math.isfinite(score) and not self._has_warned and runner.is_main_process:
                self._has_warned = True
                logger.warning(
                    "Expected the score %s.%s to be finite. Received: %s at %d.%s See to it that the metric is defined on the whole split, "
                    "or set score_name to another metric.",
                    board.split,
                    board.name,
                    score,
                    index,
                    " NaN is never the best, and counts against patience." if math.isnan(score) else "",
                )
        self.advance_schedule(boundary, result)
        if board is not None and self.patience_exhausted():
            runner._session.stop_reason, waited = "patience", standing.evaluations_since_best
            if runner.best_score is None:
                logger.info("Stopping early: no evaluation had a score that can be the best.")
            else:
                better = f"no better score than {runner.best_score:.4g}"
                logger.info("Stopping early: %s in %d evaluation%s.", better, waited, "s" * (waited != 1))
        self.write()
        ended = runner.progress >= 1 or runner._parts.loop.data_ended or runner._session.stop_reason is not None
        runner._reporter.log_result(runner, result, last=ended)

    def patience_exhausted(self) -> bool:
        """Whether the run is to stop, since its score has not become better for too long."""
        standing = self._runner.standing
        since_best = standing.evaluations_since_best if standing.board is not None else 0
        return 0 < since_best >= self._runner.config.patience

    # The schedule

    def advance_schedule(self, boundary: Boundary, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Advance a schedule that goes by epochs or validations, where it is time to."""
        scheduler, interval = self._runner.scheduler, self._runner._parts.scheduler_interval()
        if scheduler is None or self._by_updates() or (boundary == "pass" and interval != "epoch"):
            return
        by_metric = needs_metric(scheduler)
        if boundary == "alone":
            advances = interval == "epoch" and not by_metric  # what goes by an evaluation waits for one
        elif interval == "epoch":
            # At the end of a pass there is no metric, and a validation ends no epoch.
            advances = boundary != ("pass" if by_metric else "validation")
        else:
            advances = True
        if advances and by_metric:
            scheduler.step(self._monitored(metrics))
        elif advances:
            advance_by_epoch(scheduler, self._runner.state.train.epoch)

    def _by_updates(self) -> bool:
        return self._runner._parts.update.steps_scheduler

    def _monitor(self) -> str | None:
        return (self._runner.config.get("scheduler", None) or {}).get("monitor", None)

    def _monitored(self, metrics: Mapping[str, Mapping[str, float]]) -> float:
        """Return the metric that the schedule goes by: the score, or what `scheduler.monitor` names."""
        runner, path, scores = self._runner, self._monitor(), self._runner.standing.scores
        if not path and runner.index in scores:
            return scores[runner.index]
        path = path or f"{runner.score_split}.{runner.config.score_name}"
        split, _, name = path.partition(".")
        if name not in metrics.get(split, {}):
            present = [f"{key}.{metric}" for key, of_split in metrics.items() for metric in of_split]
            raise ValueError(
                f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}."
            )
        return metrics[split][name]

    # What follows from a score

    def _compare_samples(self, board: ScoreBoard, index: int) -> None:
        """Warn where a score is of another number of samples than the one before it, as after a resume with another batch size."""
        before = next(reversed([each for each in board.scores if each != index]), None)
        results = self._runner.results
        counts = [results.get(each or 0, {}).get(board.split, {}).get("samples") for each in (before, index)]
        if None not in counts and counts[0] != counts[1] and self._runner.is_main_process:
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

    def write(self) -> None:
        """Write the metrics of the run, its last ones and its best ones, on the main process."""
        runner = self._runner
        if not runner.is_main_process:
            return
        weights = "trained" if runner.ema is None else "averaged"
        latest = {"index": runner.index, "weights": weights, "result": runner.latest_result}
        best_of_split = (runner.best_result or {}).get(runner.score_split or "", {})
        is_here = runner.best_index is None or runner.best_index != runner.saver.best_elsewhere
        best = {
            "index": runner.best_index,
            "weights": weights,
            "score": runner.best_score,
            **({"samples": best_of_split["samples"]} if "samples" in best_of_split else {}),
            "result": runner.best_result,
            "checkpoint_is_here": is_here,
        }
        runner.workspace.write_results(runner.results, latest, best)
