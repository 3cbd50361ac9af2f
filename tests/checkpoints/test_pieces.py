"""Which bytes of a stored tensor a rank needs."""

from __future__ import annotations

import itertools

import pytest
import torch

from danling.checkpoints.pieces import element_runs

SHAPES = [(), (5,), (4, 3), (2, 3, 4)]


def boxes(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and lengths of every part of a shape."""
    cuts = [[(at, size) for at in range(n) for size in range(n - at + 1)] for n in shape]
    return [(tuple(at for at, _ in box), tuple(size for _, size in box)) for box in itertools.product(*cuts)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_runs_of_a_part_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for offsets, lengths in boxes(shape):
        part = whole
        for dim, (at, size) in enumerate(zip(offsets, lengths)):
            part = part.narrow(dim, at, size)
        runs = element_runs(shape, offsets, lengths)
        assert [number for first, count in runs for number in range(first, first + count)] == part.flatten().tolist()


def test_many_runs_become_one_that_has_them_all() -> None:
    ((first, count),) = element_runs((10_000, 8), (1, 2), (9_000, 3))
    assert (first, first + count) == (8 + 2, 9_000 * 8 + 2 + 3)
