"""Which evaluation was the best, and when to give up."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

# The first kind may end a longer word, as in "crossentropyloss"; the second would be found in "answer" and "cancer".
_FALLING = re.compile(
    r".*(loss|losses|errors?|perplexity|perplexities|entropy|distance|divergence)"
    r"|ppl|mse|mae|rmse|rmsle|mape|smape|nll|bpb|bpc|bits|wer|cer|ter|eer|fid|kl|brier|ece|lpips"
)
_RISING = re.compile(r".*(accuracy|acc|precision|recall|f1|auc|auroc|bleu|iou)")


def infer_mode(name: str) -> str:
    """Return `"min"` for losses, errors and perplexities, `"max"` for anything else."""
    # `valAccuracy`, `val_accuracy` and `val.accuracy` have the same words. The last one says most: `loss_accuracy` is an accuracy.
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if _RISING.fullmatch(words[-1]):
        return "max"
    return "min" if any(map(_FALLING.fullmatch, words)) else "max"


def metric_of(name: str, split: str | None) -> str:
    """Return the name of a metric without its split, with which logs and errors write it."""
    return name.removeprefix(f"{split}.") if split else name


class ScoreBoard:
    """The scores of a run, the best of them, and how long it is since.

    Args:
        name: Metric to watch, also with its split: `acc` or `val.acc`.
        split: Split it is taken from.
        mode: `"min"`, `"max"`, or `None` to infer it from the name.
        min_delta: A score is better when it differs by more than this.

    Attributes:
        scores: Scores by index, in the order of the evaluations.
        best_index: Index of the best score, `None` before there is one.
        best_score: The best score, `None` before there is one. NaN is never the best.

    Raises:
        ValueError: If the mode is unknown.
    """

    def __init__(
        self, name: str, *, split: str, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        self.name = metric_of(name, split)
        self.split = split
        self.mode = mode.lower() if mode else infer_mode(name)
        if self.mode not in ("min", "max"):
            raise ValueError(
                f"Expected score_mode to be 'min', 'max' or None. Received: score_mode={mode!r}."
            )
        self.min_delta = min_delta
        self.scores: dict[int, float] = {}
        self.best_index: int | None = None
        self.best_score: float | None = None

    def record(self, index: int, result: Mapping[str, Mapping[str, float]]) -> bool:
        """Take in an evaluation."""
        self.check(result)
        figures = result[self.split]
        # Said once, since the mode may be a guess by the name.
        if not self.scores:
            logger.info(
                "Best means the %s of %s.%s.",
                "lowest" if self.mode == "min" else "highest",
                self.split,
                self.name,
            )
        score = float(figures[self.name])
        # An evaluation that is made again comes last: the order of the scores counts for patience.
        self.scores.pop(index, None)
        self.scores[index] = score
        if self._is_better(score, self.best_score):
            self.best_index, self.best_score = index, score
        return index == self.best_index and score == self.best_score

    def check(self, result: Mapping[str, Mapping[str, float]]) -> None:
        """Refuse an evaluation without the figure."""
        if not self.finds(result):
            present = [f"{split}.{name}" for split, values in result.items() for name in values]
            source = (
                " The loss is what `evaluate_step` returns, by default from `compute_loss`: it needs `self.criterion`, or a model "
                "that returns its loss."
                if self.name == "loss"
                else ""
            )
            fix = (
                "Set score_split and score_name to one of them."
                if present
                else "If no split is to be evaluated, set evaluate_splits=[]."
            )
            raise ValueError(
                f"Expected the score {self.split}.{self.name} among the metrics of an evaluation. Received: {present}. {fix}{source}"
            )

    def finds(self, result: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether the metric is among those of an evaluation."""
        return self.name in result.get(self.split, {})

    def best_of(self, scores: Mapping[int, float]) -> int | None:
        """Return the index of the best of other scores, in their order; `None` when there is none."""
        best: int | None = None
        for index, score in scores.items():
            if self._is_better(score, scores[best] if best is not None else None):
                best = index
        return best

    def _is_better(self, score: float, best: float | None) -> bool:
        # Every comparison with NaN is false, so NaN as the first score would stay the best.
        if math.isnan(score):
            return False
        if best is None:
            return True
        gain = best - score if self.mode == "min" else score - best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the scores as plain values."""
        return {
            "scores": {str(index): score for index, score in self.scores.items()},
            "best_index": self.best_index,
            "best_score": self.best_score,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scores = {int(index): score for index, score in state["scores"].items()}
        self.best_index = state["best_index"]
        self.best_score = state["best_score"]


class BestScore:
    """The best score of a run and the latest one, by what the run says its scores are, which a program may override.

    Args:
        runner: The runner, whose `scores` and `best_index` are read.
        own: Whether the program overrides the scores.
    """

    def __init__(self, runner: BaseRunner, *, own: bool = False) -> None:
        self.board: ScoreBoard | None = None
        self.own = own
        self._runner = runner

    @property
    def scores(self) -> Mapping[int, float]:
        """The scores; none where the program's own gives nothing."""
        return self._runner.scores or {}

    @property
    def latest_index(self) -> int | None:
        """Index of the last score."""
        return next(reversed(list(self.scores)), None)

    @property
    def evaluations_since_best(self) -> int:
        """Scores after the best one; all of them where none is the best."""
        indices = list(self.scores)
        best = self._runner.best_index
        return len(indices) - 1 - indices.index(best) if best in indices else len(indices)
