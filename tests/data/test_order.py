"""The order of an epoch that is computed and not written down: a permutation, the same everywhere, and as random as one that is drawn."""

from __future__ import annotations

import math

import pytest
import torch

from danling.data import order
from danling.data.order import LISTED_UP_TO, KeyedPermutation, epoch_order

numpy = pytest.importorskip("numpy")

# Of this version of the order, for ever: an epoch that was begun with it must be ended with it.
VECTORS = [
    ((65_537, 0), [31828, 3975, 20506, 44279, 5312, 45862]),
    ((1_000_000, 7), [99206, 257927, 297872, 660489, 516907, 345470]),
    (
        (1_000_000_007, 2**62 + 3),
        [947665006, 692489181, 525545293, 479534644, 412211443, 897420878],
    ),
    (
        (1_000_000_000_000, 1),
        [731293547393, 688300367940, 37867758472, 772485209588, 780174273721, 885855465797],
    ),
]


@pytest.mark.parametrize(("key", "expected"), VECTORS)
def test_the_order_never_changes(key: tuple[int, int], expected: list[int]) -> None:
    length, seed = key
    permutation = KeyedPermutation(length, seed)
    places = [0, 1, 2, 3, length // 2, length - 1]
    assert [permutation.index(place) for place in places] == expected
    assert [permutation.indices(place, 1)[0] for place in places] == expected


@pytest.mark.parametrize("length", [1, 2, 3, 10, 1000, LISTED_UP_TO + 1, 99_991, 300_000])
def test_every_index_comes_once(length: int) -> None:
    found = KeyedPermutation(length, 5).indices(0, length)
    assert sorted(found) == list(range(length))


def test_order_is_listed_up_to_a_length_and_keyed_above() -> None:
    for length in (1, 7, LISTED_UP_TO):
        drawn = torch.randperm(length, generator=torch.Generator().manual_seed(11)).tolist()
        assert epoch_order(length, 11).indices(0, length) == drawn
    assert isinstance(epoch_order(LISTED_UP_TO + 1, 11), KeyedPermutation)
    assert epoch_order(10**12, None).indices(10**12 - 2, 5) == [10**12 - 2, 10**12 - 1]


@pytest.mark.parametrize("length", [60, 70_001, 10**12])
def test_any_part_equals_the_part_of_the_whole(length: int) -> None:
    permutation = KeyedPermutation(length, 3)
    whole = permutation.indices(length - 50, 60)
    assert len(whole) == 50
    assert (
        whole
        == [
            index
            for first in range(length - 50, length, 7)
            for index in permutation.indices(first, 7)
        ][:50]
    )
    assert permutation.indices(length, 4) == []
    places = [(3, 5), (length - 2, 9), (40, 0), (20, 1)]
    assert permutation.parts(places) == [permutation.indices(*place) for place in places]


def test_without_numpy_the_order_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    permutation = KeyedPermutation(123_456, 9)
    expected = permutation.indices(1000, 500)
    monkeypatch.setattr(order, "get_numpy", lambda: None)
    assert permutation.indices(1000, 500) == expected
    assert permutation.parts([(1000, 500)]) == [expected]


def test_a_length_out_of_range_is_refused() -> None:
    for length in (0, -1, 2**62 + 1):
        with pytest.raises(ValueError, match="between 1 and 2\\*\\*62"):
            KeyedPermutation(length, 0)


# As random as a permutation that is drawn. The statistics are those of uniform permutations; each bound is five standard
# deviations of its statistic, over many keys, and what is counted was chosen before it was looked at.

LENGTHS = [65_537, 99_991, 131_072, 1_000_003]


@pytest.mark.parametrize("length", LENGTHS)
def test_positions_are_uniform(length: int) -> None:
    """Over keys, the index at a fixed position falls into each of 16 parts equally often."""
    keys, parts = 1600, 16
    for place in (0, 1, length // 2, length - 1):
        counts = [0] * parts
        for key in range(keys):
            counts[KeyedPermutation(length, key).index(place) * parts // length] += 1
        expected = keys / parts
        chi = sum((count - expected) ** 2 / expected for count in counts)
        # 15 degrees of freedom: mean 15, standard deviation sqrt(30).
        assert chi < 15 + 5 * math.sqrt(30), (place, counts)


@pytest.mark.parametrize("length", [65_537, 99_991])
def test_inversions_and_fixed_points_are_those_of_a_random_permutation(length: int) -> None:
    size = 2000
    expected, deviation = size * (size - 1) / 4, math.sqrt(size * (size - 1) * (2 * size + 5) / 72)
    fixed = 0
    for key in range(8):
        values = numpy.array(KeyedPermutation(length, key).indices(0, length))
        part = values[:size]
        inversions = int(numpy.triu(part[:, None] > part[None, :], 1).sum())
        assert abs(inversions - expected) < 5 * deviation
        fixed += int((values == numpy.arange(length)).sum())
    # A Poisson count with a mean of one for each key.
    assert abs(fixed - 8) < 5 * math.sqrt(8)
