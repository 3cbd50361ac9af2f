"""The place of a batch in its pass, which random numbers of the training are keyed by."""

from __future__ import annotations

from typing import Any

import pytest
from support.datasets import Augmented

from danling.data import BatchSource, DataLoader, Division, open_source

LENGTH = 22
DATA = Augmented(LENGTH)


def places(source: BatchSource) -> list[tuple[int, ...]]:
    return [batch.place for batch in source.batches()]


@pytest.mark.parametrize(
    ("settings", "world_size", "expected"),
    [
        ({"batch_size": 4}, 1, [[0, 4, 8, 12, 16, 20]]),
        ({"batch_size": 4}, 2, [[0, 8, 16], [4, 12, 19]]),
        ({"batch_size": None}, 2, [[*range(0, LENGTH, 2)], [*range(1, LENGTH, 2)]]),
        ({"division": Division.of_update(9, 2, micro_batch_size=3)}, 2, [[0, 3, 9, 12, 18], [5, 7, 14, 16, 20]]),
        ({"batch_size": 10, "pad": True}, 3, [[0], [8], [15]]),
        ({"batch_size": 7, "pad": True}, 3, [[0, 21], [7, 22], [14, 22]]),  # the last two are padding
    ],
)
def test_places_are_positions_in_the_order_of_the_pass(
    settings: dict[str, Any], world_size: int, expected: list[list[int]]
) -> None:
    for rank, starts in enumerate(expected):
        loader = DataLoader(DATA, shuffle=True, seed=1, rank=rank, world_size=world_size, **settings)
        assert places(open_source(loader, split="train")) == [(start,) for start in starts]
        assert places(open_source(loader, split="train", reads=False))[: len(starts)] == [(start,) for start in starts]
