"""When a run logs, evaluates and saves between updates, and what an evaluation leads to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

Boundary = Literal["epoch", "validation", "pass", "alone"]
"""Where a run stands: at the end of an epoch, after a validation of step mode, at the end of a pass of step mode, or at the end of an epoch
that was trained by itself, without an evaluation."""

Result = Mapping[str, Mapping[str, float]]


class SaveCheckpoint(Protocol):
    """Saves the full state."""

    def __call__(self, *, history: bool = False) -> None:
        """Save it as the latest; with `history` also under its history name."""


class Boundaries:
    """Decides what is due after an update, a pass or an epoch: log, evaluate, save.

    Args:
        log_every: Updates between log lines.
        evaluate_every: Updates between evaluations of step mode.
        checkpoint_every: Epochs, or updates in step mode, between periodic checkpoints.
        save: Saves the full state. Called on all ranks.
        is_best: Tells whether the evaluation at an index gave the best score so far.
    """

    def __init__(
        self,
        *,
        log_every: int,
        evaluate_every: int,
        checkpoint_every: int,
        save: SaveCheckpoint,
        is_best: Callable[[int], bool],
    ) -> None:
        self.log_every = log_every
        self.evaluate_every = evaluate_every
        self.checkpoint_every = checkpoint_every
        self._save = save
        self._is_best = is_best

    def log_due(self, step: int) -> bool:
        """Whether the metrics of an update are logged.

        Args:
            step: Updates committed.
        """
        return step % self.log_every == 0

    def evaluation_due(self, step: int, *, final: bool = False) -> bool:
        """Whether step mode evaluates after an update.

        Args:
            step: Updates committed.
            final: Whether the run ends here.
        """
        return final or step % self.evaluate_every == 0

    def checkpoint_due(self, index: int, *, final: bool = False) -> bool:
        """Whether a checkpoint is saved whatever the evaluation gives.

        Args:
            index: Epochs, or updates in step mode, completed.
            final: Whether the run ends here.
        """
        return final or index % self.checkpoint_every == 0

    def save_if_due(self, index: int, *, final: bool = False, requested: bool = False) -> None:
        """Save where it is time to, at the end, where it was asked for, and after the best evaluation.

        Args:
            index: Epochs, or updates in step mode, completed.
            final: Whether the run ends here.
            requested: Whether a checkpoint was asked for.
        """
        if self.checkpoint_due(index, final=final):
            self._save(history=index % self.checkpoint_every == 0)
        elif requested or self._is_best(index):
            self._save()


def schedule_advances(boundary: Boundary, *, interval: str, by_metric: bool) -> bool:
    """Whether a schedule that does not go by updates advances at a boundary.

    Args:
        boundary: Where the run stands.
        interval: `scheduler.interval`: `"epoch"` or `"validation"`.
        by_metric: Whether the schedule goes by a metric, as `ReduceLROnPlateau` does.
    """
    if boundary == "alone":
        return interval == "epoch" and not by_metric  # what goes by an evaluation waits for one
    if interval == "epoch":
        # Without metrics such a schedule has nothing to go by, and a validation ends no epoch for the others.
        return boundary != ("pass" if by_metric else "validation")
    return True


def monitored_metric(result: Result, path: str) -> float:
    """Return the metric that a schedule watches.

    Args:
        result: Metrics by split.
        path: Split and name of the metric, such as `val.loss`.

    Raises:
        ValueError: If it is not among the metrics.
    """
    split, _, name = path.partition(".")
    if name not in result.get(split, {}):
        present = [f"{key}.{metric}" for key, metrics in result.items() for metric in metrics]
        raise ValueError(f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}.")
    return result[split][name]


def patience_exhausted(evaluations_since_best: int, patience: float) -> bool:
    """Whether a run is to stop, since its score has not become better for so long.

    Args:
        evaluations_since_best: Evaluations after the best one.
        patience: How many of them are waited for.
    """
    return evaluations_since_best > 0 and evaluations_since_best >= patience


def warning_of_score(name: str, score: float, index: int) -> str | None:
    """Return what to say of a score that is not finite; `None` for one that is.

    Args:
        name: Split and name of the score.
        score: The score.
        index: Epoch or update of the evaluation.
    """
    if math.isfinite(score):
        return None
    never = " NaN is never the best, and counts against patience." if math.isnan(score) else ""
    return (
        f"Expected the score {name} to be finite. Received: {score} at {index}.{never} See to it that the metric is defined on the whole "
        "split, or set score_name to another metric."
    )
