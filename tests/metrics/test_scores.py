from __future__ import annotations

import logging
import math

import pytest

from danling.metrics import ScoreBoard, infer_mode


def _record(board: ScoreBoard, index: int, score: float) -> bool:
    return board.record(index, {"val": {board.name: score}})


FALLING = """loss val_loss crossentropyloss CrossEntropyLoss error error_rate MeanSquaredError rmse perplexity ppl word-error-rate wer
loss.total hammingdistance bits_per_char FID cross_entropy brier_score"""
RISING = (
    "accuracy acc f1 auroc BLEU answer_f1 cancer_recall power r2 mAP iou error_detection_accuracy"
)


def test_losses_errors_and_perplexities_fall_and_others_rise() -> None:
    assert {name for name in f"{FALLING} {RISING}".split() if infer_mode(name) == "min"} == set(
        FALLING.split()
    )


def test_best_is_kept_and_later_scores_are_counted() -> None:
    board = ScoreBoard("loss", split="val")
    assert [_record(board, i, s) for i, s in enumerate([3.0, 2.0, 2.5, 2.0])] == [
        True,
        True,
        False,
        False,
    ]
    assert (board.best_index, board.best_score) == (1, 2.0)
    assert board.scores == {0: 3.0, 1: 2.0, 2: 2.5, 3: 2.0}


def test_better_score_follows_mode_and_delta_and_is_never_nan() -> None:
    board = ScoreBoard("acc", split="val", mode="MAX", min_delta=0.125)
    assert [_record(board, i, s) for i, s in enumerate([0.5, 0.6, 0.625, 0.64])] == [
        True,
        False,
        False,
        True,
    ]
    board = ScoreBoard("loss", split="val")
    assert [_record(board, i, s) for i, s in enumerate([math.nan, 5.0, math.nan])] == [
        False,
        True,
        False,
    ]
    assert board.best_index == 1
    assert _record(board, 1, 2.0) and _record(board, 1, 2.0) and not _record(board, 2, 3.0)
    assert list(board.scores) == [0, 1, 2]  # one that is recorded again counts once


def test_an_absent_metric_names_those_present() -> None:
    board = ScoreBoard("f1", split="val")
    with pytest.raises(ValueError, match=r"val\.f1 .*Received: \['val.loss', 'test.f1'\]"):
        board.record(0, {"val": {"loss": 1.0}, "test": {"f1": 1.0}})
    with pytest.raises(ValueError, match="'min', 'max' or None. Received: score_mode='lowest'"):
        ScoreBoard("loss", split="val", mode="lowest")


def test_the_direction_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    board = ScoreBoard("loss", split="val")
    with caplog.at_level(logging.INFO, logger="danling"):
        _record(board, 0, 1.0)
        _record(board, 1, 1.0)
    assert [record.message for record in caplog.records] == ["Best means the lowest of val.loss."]


def test_the_state_comes_back() -> None:
    board = ScoreBoard("loss", split="val")
    for index, score in enumerate([3.0, 2.0, 2.5]):
        _record(board, index, score)
    restored = ScoreBoard("loss", split="val")
    restored.load_state_dict(board.state_dict())
    assert restored.state_dict() == board.state_dict()
    _record(restored, 3, 2.25)
    assert restored.best_index == 1 and restored.scores[3] == 2.25
