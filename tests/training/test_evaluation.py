"""Ranks that evaluate together make equally many forwards; metrics of a hook are floats by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from danling.data import PLACEHOLDER, Batch
from danling.distributed import LocalDomain
from danling.training.evaluation import (
    checked_figures,
    even_out,
    gather_predictions,
    split_by_sample,
)


class Ranks:
    """Ranks of one process: threads that meet at a barrier instead of communicating."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, index: int, value: Any) -> list[Any]:
        self._values[index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Rank(LocalDomain):
    def __init__(self, ranks: Ranks, index: int) -> None:
        self.rank, self.size, self._ranks = index, ranks.size, ranks

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op == "sum"
        return tensor.copy_(torch.stack(self._ranks.exchange(self.rank, tensor.clone())).sum(0))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank, value)


def evened(own: Sequence[list[Any]], readers: Sequence[int] | None = None) -> list[list[Batch]]:
    """Return what every rank evaluates; a number in `readers` says which group of readers a rank belongs to, 0 reads nothing."""
    groups = readers or [1] * len(own)
    world = Ranks(len(own))
    of_group = {group: Ranks(groups.count(group)) for group in set(groups)}
    found: list[list[Batch]] = [[] for _ in own]

    def run(rank: int) -> None:
        group = groups[rank]
        batches = iter(
            [Batch(data, None if data is PLACEHOLDER else 2, None) for data in own[rank]]
        )
        place = groups[:rank].count(group)
        found[rank] = list(
            even_out(
                batches,
                ranks=Rank(world, rank),
                readers=Rank(of_group[group], place),
                reads=bool(group),
            )
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(own))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("counts", [(3, 3), (0, 2), (2, 0, 5), (4, 1, 0, 0), (0, 0)], ids=str)
def test_ranks_evaluate_equally_many_batches_and_each_of_them_once(counts: tuple[int, ...]) -> None:
    own = [[f"{rank}.{index}" for index in range(count)] for rank, count in enumerate(counts)]
    found = evened(own)
    assert {len(batches) for batches in found} == {max(counts)}
    for mine, batches in zip(own, found):
        assert [batch.data for batch in batches if batch.samples != 0] == mine
        spare = [batch for batch in batches if batch.samples == 0]
        # A rank that ran out repeats what it had; one that had nothing is given what another one has.
        others = {data for rank in own for data in rank[:1]}
        assert all(batch.data == mine[-1] if mine else batch.data in others for batch in spare)


def test_ranks_without_reads_continue_with_placeholders() -> None:
    # Stages of a pipeline: the first and the last one read, each over two data replicas; the middle one does not.
    own = [["a", "b"], ["c"], [PLACEHOLDER], [PLACEHOLDER, PLACEHOLDER], ["a", "b"], ["c"]]
    found = evened(own, readers=[1, 1, 0, 0, 2, 2])
    blind = [PLACEHOLDER, PLACEHOLDER]
    expected = [["a", "b"], ["c", "c"], blind, blind, ["a", "b"], ["c", "c"]]
    assert [[batch.data for batch in batches] for batches in found] == expected
    assert [batch.samples for batch in found[1]] == [2, 0]


def test_metrics_of_a_hook_are_floats_by_name() -> None:
    assert checked_figures("summarize", "val", {"loss": torch.tensor(0.5), 3: 2}) == {
        "loss": 0.5,
        "3": 2.0,
    }
    with pytest.raises(ValueError, match="Expected `summarize` to return metrics by name"):
        checked_figures("summarize", "val", None)
    with pytest.raises(ValueError, match="val/loss"):
        checked_figures("summarize", "val", {"loss": torch.ones(2)})


# Predictions are taken apart by sample, and put into the order of the dataset

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
        (
            {"x": ROWS[:, 0], "loss": torch.ones(()), "state": 7},
            [{"x": 0.0}, {"x": 2.0}, {"x": 4.0}],
        ),
        ({"loss": 1.0}, [{"loss": 1.0}]),
        (SimpleNamespace(loss=None, logits=ROWS[:, 1]), [1.0, 3.0, 5.0]),
        ("whole", ["whole"]),
        (None, [None]),
    ],
    ids=[
        "rows",
        "numbers",
        "column",
        "list",
        "tuple",
        "uneven",
        "mapping",
        "nothing",
        "output",
        "other",
        "none",
    ],
)
def test_a_prediction_is_taken_apart_by_sample(pred: Any, expected: list[Any]) -> None:
    assert plain(split_by_sample(pred, 3)) == expected


@pytest.mark.parametrize(
    "pred", [ROWS, ROWS[:, 0], ["a", "b", "c"]], ids=["rows", "numbers", "list"]
)
def test_padding_behind_the_samples_is_left_out(pred: Any) -> None:
    assert plain(split_by_sample(pred, 2)) == plain(split_by_sample(pred, 3))[:2]
    assert split_by_sample(pred, 0) == []


def test_ranks_with_alternating_batches_give_the_order_of_the_dataset() -> None:
    # Twelve samples in batches of two over three ranks, and a last one of one sample on the first rank.
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12]]
    mine, *others = [batches[rank::3] for rank in range(3)]
    gathered: Any = SimpleNamespace(gather_objects=lambda value: [value, *others])
    assert gather_predictions(mine, gathered) == list(range(13))


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
