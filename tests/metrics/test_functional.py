from __future__ import annotations

import pytest
import torch
from sklearn import metrics as reference

from danling.metrics import accuracy, mean_absolute_error, mean_squared_error, top_k_accuracy


def _ratio(totals: tuple[torch.Tensor | float, torch.Tensor | float]) -> float:
    return float(totals[0]) / float(totals[1])


def test_figures_equal_those_of_scikit_learn() -> None:
    pred, target = torch.randn(50, 7), torch.randint(0, 7, (50,))
    assert _ratio(accuracy(pred, target)) == reference.accuracy_score(target, pred.argmax(-1))
    assert _ratio(top_k_accuracy(pred, target, 3)) == pytest.approx(
        reference.top_k_accuracy_score(target, pred, k=3)
    )
    values = torch.randn(50, 7)
    assert _ratio(mean_squared_error(pred, values)) == pytest.approx(
        reference.mean_squared_error(values, pred)
    )
    assert _ratio(mean_absolute_error(pred, values)) == pytest.approx(
        reference.mean_absolute_error(values, pred)
    )


def test_classes_may_come_second_or_last() -> None:
    target = torch.randint(0, 5, (2, 3, 4))
    scores = torch.nn.functional.one_hot(target, 5).float()
    assert tuple(map(int, accuracy(scores, target))) == (24, 24)
    assert tuple(map(int, accuracy(scores.movedim(-1, 1), target))) == (24, 24)


def test_ambiguous_task_must_be_named() -> None:
    target = torch.randint(0, 5, (2, 5))
    scores = torch.nn.functional.one_hot(target, 5).float()
    with pytest.raises(ValueError, match="in two ways; pass dim"):
        accuracy(scores, target)
    assert tuple(map(int, accuracy(scores, target, dim=-1))) == (10, 10)


@pytest.mark.parametrize("shape", [(6, 1), (6, 2, 3), (5, 2), (6,)])
def test_mismatched_shapes_are_errors(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Expected .*scores"):
        accuracy(torch.randn(shape), torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 2])
@pytest.mark.parametrize("classes", [False, True])
def test_ignored_targets_are_neither_right_nor_counted(ignore_index: int, classes: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    pred = torch.randn(50, 4, generator=generator)
    target = torch.randint(4, (50,), generator=generator)
    target[::3] = ignore_index
    given = torch.where(target == ignore_index, target, pred.argmax(1)) if classes else pred
    guesses = [int(guess) for guess in (given if classes else pred.argmax(1))]
    counts = [
        (guess, true) for guess, true in zip(guesses, target.tolist()) if true != ignore_index
    ]
    correct = sum(guess == true for guess, true in counts)
    assert tuple(map(int, accuracy(given, target, ignore_index))) == (correct, len(counts))
