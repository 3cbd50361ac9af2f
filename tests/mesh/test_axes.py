from __future__ import annotations

import itertools
from math import prod

import pytest

from danling.mesh.axes import (
    AXES,
    MESH_ORDER,
    Axes,
    check_expert_width,
    check_experts,
    check_heads,
    check_micro_batches,
    check_sequence,
)

WORLDS = [
    ({}, 1),
    ({"shard": 2, "tensor": 2}, 4),
    ({"replicate": 2, "shard": 2, "pipeline": 2}, 8),
    (dict.fromkeys(AXES, 2), 128),
    ({"replicate": 2, "context": 3, "expert": 2, "expert_tensor": 2}, 24),
]


def naive_coordinates(degrees: dict[str, int]) -> list[dict[str, int]]:
    """Coordinates by rank, counted out."""
    places = itertools.product(*(range(degrees.get(name, 1)) for name in MESH_ORDER))
    return [dict(zip(MESH_ORDER, place)) for place in places]


@pytest.mark.parametrize(("degrees", "world"), WORLDS)
def test_coordinates_and_ranks_equal_those_counted_out(degrees: dict[str, int], world: int) -> None:
    axes = Axes.resolve(degrees, world_size=world)
    places = naive_coordinates(degrees)
    assert len(places) == world == axes.world_size
    for rank, place in enumerate(places):
        assert axes.coordinate(rank) == place
        for names in [(), ("tensor",), ("replicate", "shard"), ("shard", "pipeline"), AXES]:
            rest = [name for name in AXES if name not in names]
            together = [r for r, other in enumerate(places) if all(other[n] == place[n] for n in rest)]
            assert axes.ranks(*names, rank=rank) == together
            assert axes.index(*names, rank=rank) == together.index(rank)


def test_largest_world_is_arithmetic() -> None:
    axes = Axes.resolve({"replicate": -1, "shard": 16, "pipeline": 4, "tensor": 8, "expert": 2}, world_size=16384)
    assert axes.degree("replicate") == 16
    assert axes.coordinate(16383) == {name: axes.degree(name) - 1 for name in AXES}
    data = axes.ranks("replicate", "shard", rank=9000)
    assert len(set(data)) == 256 and 9000 in data
    assert axes.ranks("tensor", rank=9001) == list(range(9000, 9008))
    # Every group of an axis is the same set of ranks for all of its members, and the groups cover the world once.
    groups = {tuple(axes.ranks("shard", "expert", rank=rank)) for rank in range(16384)}
    assert sum(map(len, groups)) == 16384


@pytest.mark.parametrize("axis", AXES)
def test_minus_one_is_filled(axis: str) -> None:
    other = "shard" if axis != "shard" else "tensor"
    axes = Axes.resolve({axis: -1, other: 3}, world_size=12)
    assert axes.degree(axis) == 4 and prod(axes.degrees.values()) == 12
    assert set(axes.active) == {axis, other}


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"shard": 3}, "world size 4"),
        ({"shard": 8}, "product 8"),
        ({"shard": -1, "tensor": 3}, "multiple of 3"),
        ({"shard": -1, "tensor": -1}, "at most one"),
        ({"shard": 0}, ">= 1"),
        ({"shard": -2}, ">= 1"),
        ({"shard": True}, ">= 1"),
        ({"shard": 2.0, "tensor": 2}, ">= 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_all_axes(degrees: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        Axes.resolve(degrees, world_size=4)
    for name in AXES:
        assert f"{name}=" in str(error.value)


def test_unknown_axis_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'tensor'"):
        Axes.resolve({"tensr": 2}, world_size=2)
    with pytest.raises(ValueError, match="'data'"):
        Axes.resolve({}, world_size=1).degree("data")


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= rank < 2"):
        Axes.resolve({"shard": 2}, world_size=2).coordinate(2)


def test_what_divides_gives_the_share_of_a_rank() -> None:
    axes = Axes.resolve(dict.fromkeys(AXES, 2), world_size=128)
    assert check_heads(axes, 8) == 4
    assert check_heads(axes, 8, split_by_context=True) == 2
    assert check_sequence(axes, 16) == 8
    assert check_sequence(axes, 16, split_by_tensor=True) == 4
    assert check_experts(axes, 6) == 3
    assert check_expert_width(axes, 10) == 5
    assert check_micro_batches(axes, 8, micro_batch_size=2) == 4
    assert check_micro_batches(axes, 8, number=2) == 2


def test_what_does_not_divide_is_refused_with_all_axes() -> None:
    axes = Axes.resolve(dict.fromkeys(AXES, 2), world_size=128)
    refusals = [
        lambda: check_heads(axes, 3),
        lambda: check_heads(axes, 6, split_by_context=True),
        lambda: check_sequence(axes, 15),
        lambda: check_sequence(axes, 6, split_by_tensor=True),
        lambda: check_experts(axes, 0),
        lambda: check_expert_width(axes, 7),
        lambda: check_micro_batches(axes, 7, micro_batch_size=2),
        lambda: check_micro_batches(axes, 7, number=3),
        lambda: check_micro_batches(axes, 7, number=0),
    ]
    for refusal in refusals:
        with pytest.raises(ValueError, match="multiple of") as error:
            refusal()
        for name in AXES:
            assert f"{name}=2" in str(error.value)
