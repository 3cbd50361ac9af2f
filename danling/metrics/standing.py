"""Where the scores of a run stand: the best one, the latest, and how long it is since."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .scores import ScoreBoard


class Standing:
    """Answers by what the run says its scores are, which a program may make of anything."""

    def __init__(
        self,
        scores: Callable[[], Mapping[int, float] | None],
        best_index: Callable[[], int | None],
        *,
        own: bool = False,
    ) -> None:
        self.board: ScoreBoard | None = None
        self.own = own
        self._scores, self._best_index = scores, best_index

    @property
    def recorded(self) -> dict[int, float]:
        """What the board holds: scores of evaluations only."""
        return dict(self.board.scores) if self.board is not None else {}

    @property
    def scores(self) -> Mapping[int, float]:
        """The scores; none where the program's own gives nothing."""
        return self._scores() or {}

    def find_best(self) -> int | None:
        """Return the index of the best of the scores; `None` before there is one."""
        if self.board is None:
            return None
        return self.board.best_of(self.scores) if self.own else self.board.best_index

    @property
    def best_score(self) -> float | None:
        """The best score."""
        index = self._best_index()
        return self.scores.get(index) if index is not None else None

    @property
    def latest_index(self) -> int | None:
        """Index of the last score."""
        return next(reversed(list(self.scores)), None)

    @property
    def latest_score(self) -> float | None:
        """The last score."""
        scores = self.scores
        return scores[list(scores)[-1]] if scores else None

    @property
    def latest_is_best(self) -> bool:
        """Whether the last score is the best one."""
        latest = self.latest_index
        return latest is not None and self._best_index() == latest

    @property
    def evaluations_since_best(self) -> int:
        """Scores after the best one; all of them where none is the best."""
        indices, best = list(self.scores), self._best_index()
        return len(indices) - 1 - indices.index(best) if best in indices else len(indices)
