"""The metrics of a run by epoch or evaluation: what is recorded, and what follows from a score."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from danling.metrics import ScoreBoard, as_number
from danling.reporting import Reporter

from .schedule import Boundary, Schedule
from .session import TrainingSession

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


def checked_figures(hook: str, split: str, figures: object) -> dict[str, float]:
    """Return the figures of a hook for a split as floats: checkpoints and files store nothing else."""
    if not isinstance(figures, Mapping):
        raise ValueError(
            f"Expected `{hook}` to return metrics by name. Received: {figures!r} ({type(figures).__name__}) for split {split!r}. Return "
            f"those of super().{hook}(...), or a mapping such as {{'loss': 0.5}}."
        )
    return {str(name): as_number(f"{split}/{name}", value) for name, value in figures.items()}


class RunResults:
    """Metrics of the epoch or the evaluation that is under way, and their record.

    Attributes:
        open: Metrics by split that are not recorded yet.
        scored_at: Updates committed at the last record.
    """

    def __init__(
        self, runner: TorchRunner, session: TrainingSession, schedule: Schedule, reporter: Reporter
    ) -> None:
        self.open: dict[str, dict[str, float]] = {}
        self.scored_at: int | None = None
        self._runner = runner
        self._session = session
        self._schedule = schedule
        self._reporter = reporter
        self._has_warned = False

    def check(self) -> None:
        """Refuse metrics without the score, or without the metric of the schedule, before anything is counted by them."""
        standing = self._runner.standing
        if standing.board is not None and standing.board.split in self.open and not standing.own:
            standing.board.check(self.open)
        self._schedule.check_metrics(self.open)

    def close(self, boundary: Boundary) -> None:
        """Record the metrics, and do what follows from them; the same on all ranks."""
        runner, standing = self._runner, self._runner.standing
        result, self.open = self.open, {}
        index, self.scored_at = runner.index, runner.state.train.global_step
        runner.results[index] = result
        board = standing.board
        if board is not None:
            # A program with scores of its own may have no split for them.
            has_score = board.split in result if board.split else index in standing.scores
            board = board if has_score else None
        if board is not None and board.split and (board.finds(result) or not standing.own):
            self._compare_samples(board, index)
            board.record(index, result)
            score = board.scores[index]
            if not math.isfinite(score) and not self._has_warned and runner.is_main_process:
                self._has_warned = True
                logger.warning(
                    "Expected the score %s.%s to be finite. Received: %s at %d. NaN is never the best, and counts against patience. See "
                    "to it that the metric is defined on the whole split, or set score_name to another metric.",
                    *(board.split, board.name, score, index),
                )
        # After the score is recorded, by which a schedule may go.
        self._schedule.advance(boundary, result)
        if board is not None and self.patience_exhausted():
            self._session.stop_reason = "patience"
            waited = standing.evaluations_since_best
            best = "NaN" if runner.best_score is None else f"{runner.best_score:.4g}"
            logger.info(
                "Stopping early: no better score than %s in %d evaluation%s.",
                best,
                waited,
                "s" * (waited != 1),
            )
        self.write()
        ended = (
            runner.progress >= 1
            or self._session.data_ended
            or self._session.stop_reason is not None
        )
        self._reporter.log_result(runner, result, last=ended)
        self._reporter.trackers.release_mark()

    def patience_exhausted(self) -> bool:
        """Whether the run is to stop, since its score has not become better for too long."""
        standing = self._runner.standing
        since_best = standing.evaluations_since_best if standing.board is not None else 0
        return 0 < since_best >= self._runner.config.patience

    # What follows from a score

    def _compare_samples(self, board: ScoreBoard, index: int) -> None:
        """Warn where a score is of another number of samples than the one before it, as after a resume with another batch size."""
        before = next(reversed([each for each in board.scores if each != index]), None)
        results = self._runner.results
        counts = [
            results.get(each or 0, {}).get(board.split, {}).get("samples")
            for each in (before, index)
        ]
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
        best: dict[str, Any] = {
            "index": runner.best_index,
            "weights": weights,
            "score": runner.best_score,
        }
        if "samples" in best_of_split:
            best["samples"] = best_of_split["samples"]
        best |= {"result": runner.best_result, "checkpoint_is_here": is_here}
        runner.workspace.write_results(runner.results, latest, best)
