"""Predictions taken apart by sample, and put into the order of the dataset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.training.evaluation import gather_predictions, split_by_sample

ROWS = torch.arange(6.0).reshape(3, 2)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("pred", "expected"),
    [
        (ROWS, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
        (ROWS[:, 0], [0.0, 2.0, 4.0]),
        (ROWS[:, :1], [0.0, 2.0, 4.0]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ((ROWS, ["a", "b", "c"]), [([0.0, 1.0], "a"), ([2.0, 3.0], "b"), ([4.0, 5.0], "c")]),
        ((ROWS, "state"), [([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], "state")]),
        ({"x": ROWS[:, 0], "loss": torch.ones(()), "state": 7}, [{"x": 0.0}, {"x": 2.0}, {"x": 4.0}]),
        ({"loss": 1.0}, [{"loss": 1.0}]),
        (SimpleNamespace(loss=None, logits=ROWS[:, 1]), [1.0, 3.0, 5.0]),
        ("whole", ["whole"]),
        (None, [None]),
    ],
    ids=["rows", "numbers", "column", "list", "tuple", "uneven", "mapping", "nothing", "output", "other", "none"],
)
def test_a_prediction_is_taken_apart_by_sample(pred: Any, expected: list[Any]) -> None:
    assert plain(split_by_sample(pred, 3)) == expected


@pytest.mark.parametrize("pred", [ROWS, ROWS[:, 0], ["a", "b", "c"]], ids=["rows", "numbers", "list"])
def test_padding_behind_the_samples_is_left_out(pred: Any) -> None:
    assert plain(split_by_sample(pred, 2)) == plain(split_by_sample(pred, 3))[:2]
    assert split_by_sample(pred, 0) == []


class Gathered:
    rank, size = 0, 2

    def __init__(self, *others: Any) -> None:
        self._others = others

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_ranks_that_take_batches_in_turn_give_the_order_of_the_dataset() -> None:
    # Twelve samples in batches of two over three ranks, and a last one of one sample on the first rank.
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12]]
    mine, *others = [batches[rank::3] for rank in range(3)]
    gathered: Any = Gathered(*others)
    assert gather_predictions(mine, gathered) == list(range(13))
    empty: Any = Gathered([], [])
    assert gather_predictions([], empty) == []


def test_rows_of_parts_are_taken_apart_by_sample() -> None:
    nodes = torch.arange(14.0).reshape(7, 2)
    rows = split_by_sample({"nodes": nodes, "graphs": torch.arange(3)}, 3, [2, 1, 4])
    assert [row["graphs"] for row in rows] == [0, 1, 2]
    assert all(map(torch.equal, (row["nodes"] for row in rows), nodes.split([2, 1, 4])))
    assert len(split_by_sample(nodes, 2, [2, 1, 4])) == 2
    assert split_by_sample(torch.arange(3), 2, [2, 1, 4]) == [0, 1]  # one of the three is padding
    edges = torch.arange(9.0)
    (whole,) = split_by_sample(edges, 3, [2, 1, 4])
    assert torch.equal(whole, edges)  # neither a row a sample nor a row a part
