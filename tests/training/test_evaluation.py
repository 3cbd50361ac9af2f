"""Ranks that evaluate together make equally many forwards; metrics of a hook are floats by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from danling.data import PLACEHOLDER, Batch
from danling.training.evaluation import checked_figures, even_out


class Ranks:
    """Ranks of one process: threads that meet at a barrier instead of communicating."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def rank(self, index: int) -> Rank:
        return Rank(self, index)

    def exchange(self, index: int, value: Any) -> list[Any]:
        self._values[index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, ranks: Ranks, index: int) -> None:
        self.rank, self.size, self._ranks = index, ranks.size, ranks

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op == "sum"
        return tensor.copy_(torch.stack(self._ranks.exchange(self.rank, tensor.clone())).sum(0))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self._ranks.exchange(self.rank, value)[source]

    def barrier(self) -> None:
        self._ranks.exchange(self.rank, None)


def evened(own: Sequence[list[Any]], readers: Sequence[int] | None = None) -> list[list[Batch]]:
    """Return what every rank evaluates; a number in `readers` says which group of readers a rank belongs to, 0 reads nothing."""
    groups = readers or [1] * len(own)
    world = Ranks(len(own))
    of_group = {group: Ranks(groups.count(group)) for group in set(groups)}
    found: list[list[Batch]] = [[] for _ in own]

    def run(rank: int) -> None:
        group = groups[rank]
        batches = iter([Batch(data, None if data is PLACEHOLDER else 2, None) for data in own[rank]])
        place = groups[:rank].count(group)
        found[rank] = list(
            even_out(batches, ranks=world.rank(rank), readers=of_group[group].rank(place), reads=bool(group))
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


def test_ranks_that_read_nothing_go_on_with_placeholders() -> None:
    # Stages of a pipeline: the first and the last one read, each over two data replicas; the middle one does not.
    own = [["a", "b"], ["c"], [PLACEHOLDER], [PLACEHOLDER, PLACEHOLDER], ["a", "b"], ["c"]]
    found = evened(own, readers=[1, 1, 0, 0, 2, 2])
    assert [[batch.data for batch in batches] for batches in found] == [
        ["a", "b"],
        ["c", "c"],
        [PLACEHOLDER, PLACEHOLDER],
        [PLACEHOLDER, PLACEHOLDER],
        ["a", "b"],
        ["c", "c"],
    ]
    assert [batch.samples for batch in found[1]] == [2, 0]


def test_metrics_of_a_hook_are_floats_by_name() -> None:
    assert checked_figures("summarize", "val", {"loss": torch.tensor(0.5), 3: 2}) == {"loss": 0.5, "3": 2.0}
    with pytest.raises(ValueError, match="Expected `summarize` to return metrics by name"):
        checked_figures("summarize", "val", None)
    with pytest.raises(ValueError, match="val/loss"):
        checked_figures("summarize", "val", {"loss": torch.ones(2)})
