"""Replicas divide what they write among them without a word: planned in torch's fake process group, in the place of every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from danling.checkpoints.dcp_plans import SavePlanner


@contextmanager
def in_place_of(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def state(replicas: int, shards: int) -> dict[str, Any]:
    """Tensors of several sizes over both axes of a mesh, some of them whole on every rank, and plain values beside them."""
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))

    def divided(*shape: int) -> DTensor:
        return DTensor.from_local(torch.empty(shape), mesh, [Replicate(), Shard(0)], run_check=False)

    def whole(*shape: int) -> DTensor:
        return DTensor.from_local(torch.empty(shape), mesh, [Replicate(), Replicate()], run_check=False)

    names = {"large": divided(64, 8), "small": divided(2, 8), "odd": divided(3, 5), "norm": whole(16), "bias": whole(8)}
    moments = {name: {"exp_avg": leaf, "step": torch.zeros(())} for name, leaf in names.items()}
    return {"model": names, "optimizer": {"state": moments}, "buffer": torch.zeros(4), "runner": {"epoch": 1}}


def plans(replicas: int, shards: int) -> list[SavePlan]:
    found = []
    for rank in range(replicas * shards):
        with in_place_of(rank, replicas * shards):
            planner = SavePlanner()
            planner.set_up_planner(state(replicas, shards), is_coordinator=rank == 0)
            found.append(planner.create_local_plan())
    return found


def divided(plan: SavePlan) -> list[Any]:
    return [item for item in plan.items if item.index.fqn.startswith(("model", "optimizer"))]


def nbytes(plan: SavePlan) -> int:
    return sum(item.tensor_data.chunk.sizes.numel() for item in divided(plan) if item.tensor_data is not None)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 4), (4, 1), (2, 2), (3, 2)])
def test_each_part_is_planned_by_one_rank(replicas: int, shards: int) -> None:
    planned = plans(replicas, shards)
    counted = Counter(item.index for plan in planned for item in divided(plan))
    parts = {index: count for index, count in counted.items() if not index.fqn.endswith(".step")}
    assert set(parts.values()) == {1}
    sharded, whole = 3 * 2, 2 * 2  # weights and moments
    assert len(parts) == sharded * shards + whole
    steps = counted - Counter(parts)
    assert len(steps) == 5 and max(steps.values()) <= shards, "of replicas one plans it"
    # What every rank may have, and rank 0 decides on.
    assert all({"buffer", "runner"} <= {item.index.fqn for item in plan.items} for plan in planned)
    names = {item.index.fqn for plan in planned for item in plan.items}
    assert names == set().union(*(plan.planner_data for plan in planned))


def test_replicas_write_about_as_much_as_each_other() -> None:
    sizes = [nbytes(plan) for plan in plans(2, 2)]
    # The first of two replicas of a shard writes the large weight, the second one its moment.
    assert max(sizes) - min(sizes) <= 64


def test_rank_0_makes_a_whole_of_it() -> None:
    planned = plans(2, 2)
    with in_place_of(0, 4):
        planner = SavePlanner()
        planner.set_up_planner(state(2, 2), is_coordinator=True)
        _, metadata = planner.create_global_plan(planned)
        assert metadata.state_dict_metadata.keys() == planner.state_dict.keys() == metadata.planner_data.keys()
