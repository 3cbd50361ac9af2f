"""Where scores stand, without a runner."""

from __future__ import annotations

import math
from collections.abc import Mapping

from danling.metrics import ScoreBoard
from danling.metrics.standing import Standing


class Run:
    """What a program says of its scores, and which one it holds for the best."""

    def __init__(self, scores: Mapping[int, float] | None = None) -> None:
        self.own = scores
        self.standing = Standing(self.scores, lambda: self.standing.find_best(), own=scores is not None)

    def scores(self) -> Mapping[int, float] | None:
        """Return the program's own scores, or those of the board."""
        return self.own if self.own is not None else self.standing.recorded


def test_before_the_first_evaluation_nothing_is_the_best() -> None:
    standing = Run().standing
    assert (standing.best_score, standing.latest_score, standing.latest_index, standing.find_best()) == (None,) * 4
    assert not standing.latest_is_best and standing.evaluations_since_best == 0 and standing.scores == {}


def test_scores_of_the_board_are_read_as_they_are_now() -> None:
    standing = Run().standing
    standing.board = ScoreBoard("loss", split="val")
    for index, loss in enumerate([3.0, 1.0, 2.0, math.nan], start=1):
        standing.board.record(index, {"val": {"loss": loss}})
        if index == 2:
            assert standing.latest_is_best and standing.evaluations_since_best == 0
    assert (standing.find_best(), standing.best_score, standing.latest_index) == (2, 1.0, 4)
    assert not standing.latest_is_best and standing.evaluations_since_best == 2
    standing.recorded.clear()
    assert len(standing.recorded) == 4  # a copy


def test_scores_of_the_programs_own_go_by_its_order_and_the_mode_of_the_board() -> None:
    run = Run({10: 0.2, 20: 0.9, 30: 0.4})
    assert run.standing.find_best() is None  # nobody knows yet what better means
    run.standing.board = ScoreBoard("accuracy", split="")
    assert (run.standing.find_best(), run.standing.best_score, run.standing.latest_score) == (20, 0.9, 0.4)
    assert run.standing.evaluations_since_best == 1
    run.own = {**(run.own or {}), 40: 0.95}
    assert run.standing.latest_is_best


def test_an_override_that_gives_nothing_has_no_scores() -> None:
    standing = Standing(lambda: None, lambda: 7, own=True)
    assert standing.scores == {} and standing.best_score is None and standing.evaluations_since_best == 0
