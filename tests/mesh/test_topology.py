from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from support.processes import run_processes
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from danling.distributed import LocalDomain
from danling.mesh import Topology
from danling.mesh.axes import AXES


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A world whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def counted_groups() -> Iterator[list[int]]:
    """Sizes of the groups of this rank other than the default one, filled at the end of the block."""
    sizes: list[int] = []
    before = len(dist.distributed_c10d._world.pg_map)
    yield sizes
    groups = list(dist.distributed_c10d._world.pg_map)[before:]
    sizes.extend(sorted(group.size() for group in groups))


def test_one_process_needs_no_group() -> None:
    topology = Topology({})
    assert topology.mesh(*AXES) is None and topology.group(*AXES) is None
    for domain in (topology.data, topology.optimizer):
        assert isinstance(domain, LocalDomain) and (domain.rank, domain.size) == (0, 1)
    assert (topology.degree("tensor"), topology.rank("tensor"), topology.ranks("tensor")) == (
        1,
        0,
        [0],
    )
    with pytest.raises(ValueError, match="world size 1"):
        Topology({"tensor": 2})


@pytest.mark.parametrize("rank", [0, 4097, 16383])
def test_largest_world(rank: int) -> None:
    with fake_world(rank, 16384):
        topology = Topology({"replicate": 4, "shard": -1, "pipeline": 4, "tensor": 8})
        axes, mesh = topology.axes, topology.mesh(*AXES)
        assert axes.degree("shard") == 128
        assert mesh is not None and mesh.mesh_dim_names == (
            "pipeline",
            "replicate",
            "shard",
            "tensor",
        )
        assert tuple(mesh.get_coordinate() or ()) == tuple(
            topology.coordinate[n] for n in axes.active
        )
        assert (topology.optimizer.size, topology.optimizer.rank) == (16384, rank)
        assert (topology.data.size, topology.data.rank) == (
            512,
            axes.index("replicate", "shard", rank=rank),
        )
        assert dist.get_process_group_ranks(topology.data.group) == topology.ranks(
            "replicate", "shard"
        )
        for axis in axes.active:
            group = topology.group(axis)
            assert group is not None and dist.get_process_group_ranks(group) == topology.ranks(axis)


def test_axes_of_one_cost_no_communicator() -> None:
    with fake_world(5, 8), counted_groups() as sizes:
        topology = Topology({"shard": 2, "tensor": 4})
        assert topology.data.group is topology.group("shard")
        assert topology.optimizer.group is dist.group.WORLD
        assert topology.mesh("replicate", "shard") is not None
        assert topology.group("replicate", "shard") is topology.group("shard", "context")
    assert sizes == [2, 4]
    with fake_world(0, 8), counted_groups() as sizes:
        topology = Topology({"replicate": 2, "shard": 2, "tensor": 2})
        assert topology.data.size == 4
        assert topology.group("shard", "replicate") is topology.data.group
    assert sizes == [2, 2, 2, 4], "several axes are one flattened group"
    with fake_world(1, 8), counted_groups() as sizes:
        topology = Topology({"replicate": 2, "shard": 4})
        assert topology.data.group is dist.group.WORLD and topology.data.rank == 1
    assert sizes == [2, 4]
    with (
        fake_world(0, 8),
        counted_groups() as sizes,
        pytest.raises(ValueError, match="world size 8"),
    ):
        Topology({"shard": 3})
    assert sizes == []


def test_without_data_axes_every_rank_reads_the_same() -> None:
    with fake_world(3, 4):
        topology = Topology({"tensor": 2, "pipeline": 2})
        assert (topology.data.rank, topology.data.size) == (0, 1)
        assert isinstance(topology.data, LocalDomain)


def test_views_are_named_and_ordered() -> None:
    with fake_world(0, 8):
        topology = Topology({"replicate": 2, "shard": 2, "tensor": 2})
        view = topology.mesh("shard", "replicate")
        assert view is not None and view.mesh_dim_names == ("replicate", "shard")
        only = topology.mesh("shard", "context")
        assert only is not None and only.mesh_dim_names == ("shard",)
        with pytest.raises(ValueError, match="Did you mean 'tensor'"):
            topology.mesh("tensro")


@pytest.mark.parametrize(
    "degrees",
    [{"shard": 2, "context": 2, "tensor": 2}, {"replicate": 2, "pipeline": 2, "expert": 2}],
)
def test_placement_counts_every_loss_and_sample_once(degrees: dict[str, int]) -> None:
    placements, coordinates = [], []
    for rank in range(8):
        with fake_world(rank, 8):
            topology = Topology(degrees)
            place = topology.coordinate
            coordinates.append(place)
            # As the last stage of a pipeline has the loss.
            placements.append(
                topology.placement(
                    has_loss=place["pipeline"] == topology.axes.degree("pipeline") - 1
                )
            )
            assert placements[-1].metrics.size == topology.axes.degree(
                "replicate", "shard", "context", "pipeline"
            )
            assert (
                placements[-1].data is topology.data
                and placements[-1].optimizer is topology.optimizer
            )
    counting = [place for place, mine in zip(coordinates, placements) if mine.counts_loss]
    # One rank for every set of samples and positions.
    assert len(counting) == len({(p["replicate"], p["shard"], p["context"]) for p in coordinates})
    sampling = [place for place, mine in zip(coordinates, placements) if mine.counts_samples]
    assert len(sampling) == len({(p["replicate"], p["shard"]) for p in coordinates})
    # Ranks with other positions of the same samples draw different numbers; an optimizer does so for different shards only.
    own, divided = (
        [axis for axis in names if axis in degrees]
        for names in (("context",), ("pipeline", "shard"))
    )
    assert [mine.forward_place for mine in placements] == [
        tuple(place[axis] for axis in own) for place in coordinates
    ]
    assert [mine.update_place for mine in placements] == [
        tuple(place[axis] for axis in divided) for place in coordinates
    ]


def limits_of_groups() -> list[float]:
    warnings.simplefilter(
        "error", FutureWarning
    )  # torch 2.15 warns of the name that earlier ones have
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    topology = Topology({"replicate": 2, "shard": 2})
    groups = [topology.group(axis) for axis in ("replicate", "shard")]
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    dist.barrier()  # the first rank keeps the store that the others connect by
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.timeout(100)
def test_groups_of_a_mesh_have_the_time_limit_of_the_default_group() -> None:
    """torch gives them 30 minutes, so that ranks that wait for each other in the first update did so for that long."""
    assert run_processes(limits_of_groups, world_size=4, timeout=60) == [[77.0, 77.0]] * 4
