from __future__ import annotations

import itertools
import subprocess
import sys
from math import prod

import pytest

from danling.config.schema import AxesConfig
from danling.mesh.axes import AXES, MESH_ORDER, TRAITS, Axes, axes_with

WORLDS = [
    ({}, 1),
    ({"shard": 2, "tensor": 2}, 4),
    ({"replicate": 2, "shard": 2, "pipeline": 2}, 8),
    (dict.fromkeys(AXES, 2), 128),
    ({"replicate": 2, "context": 3, "expert": 2, "expert_tensor": 2}, 24),
]


@pytest.mark.parametrize(("degrees", "world"), WORLDS)
def test_coordinates_and_ranks_equal_those_counted_out(degrees: dict[str, int], world: int) -> None:
    axes = Axes.resolve(degrees, world_size=world)
    counted = itertools.product(*(range(degrees.get(name, 1)) for name in MESH_ORDER))
    places = [dict(zip(MESH_ORDER, place)) for place in counted]
    assert len(places) == world == axes.world_size
    for rank, place in enumerate(places):
        assert axes.coordinate(rank) == place
        for names in [(), ("tensor",), ("replicate", "shard"), ("shard", "pipeline"), AXES]:
            rest = [name for name in AXES if name not in names]
            together = [
                r for r, other in enumerate(places) if all(other[n] == place[n] for n in rest)
            ]
            assert axes.ranks(*names, rank=rank) == together
            assert axes.index(*names, rank=rank) == together.index(rank)


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
    ],
)
def test_mismatched_size_is_refused_with_all_axes(degrees: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        Axes.resolve(degrees, world_size=4)
    for name in AXES:
        assert f"{name}=" in str(error.value)


def test_unknown_axis_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'tensor'"):
        Axes.resolve({"tensr": 2}, world_size=2)
    with pytest.raises(ValueError, match="'data'"):
        Axes.resolve({}, world_size=1).degree("data")


def test_a_size_is_divided_or_refused_with_all_axes() -> None:
    axes = Axes.resolve(dict.fromkeys(AXES, 2), world_size=128)
    assert axes.share(8, "tensor", what="heads") == 4
    assert axes.share(8, "tensor", "context", what="heads") == 2
    for size, names in ((3, ("tensor",)), (6, ("context", "tensor")), (0, ("expert",))):
        with pytest.raises(
            ValueError, match=f"heads to be a multiple of {' x '.join(names)} = "
        ) as error:
            axes.share(size, *names, what="heads")
        assert all(f"{name}=2" in str(error.value) for name in AXES)


def test_the_table_of_axes() -> None:
    assert MESH_ORDER == (
        "pipeline",
        "replicate",
        "shard",
        "context",
        "expert",
        "expert_tensor",
        "tensor",
    )
    assert sorted(row.mesh_place for row in TRAITS.values()) == list(range(len(TRAITS)))
    assert tuple(AxesConfig().keys()) == AXES
    with pytest.raises(AttributeError, match="reads_datum"):
        axes_with(reads_datum=True)


def test_axes_are_read_without_torch() -> None:
    code = "import sys, danling.mesh; danling.mesh.AXES; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
