"""How what is done once a run, a save or an update grows with the number of ranks, without the ranks.

    python benchmarks/scale.py                        # 64, 1,024 and 16,384 ranks, in one process; some minutes
    python benchmarks/scale.py --json scale.json

One process takes the place of one rank in torch's fake process group, in which collectives do nothing: of rank 0, and of the last one.
The model has the shapes of a language model of 70 billion parameters, is on the meta device, and is sharded with AdamW's state over
groups of at most `SHARDS` ranks, which are replicated (HSDP). What rank 0 does for all ranks is measured for as many as memory holds
well, and the rest is extrapolated by the growth between the two largest, which is said with an `~`. Seconds are those of this process.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from danling.checkpoints.dcp_target import SavePlanner
from danling.data.sampler import Division, PositionedBatchSampler, Share
from danling.distributed import StepSync, StepTotals
from danling.mesh import Topology

RANKS, SHARDS, MEASURED = (64, 1024, 16384), 1024, (8, 16, 32)
DEPTH, WIDTH, HIDDEN, KEYS, VOCABULARY = 80, 8192, 28672, 1024, 128256
SAMPLES = 10**9

T = TypeVar("T")


@dataclass
class Figure:
    """One measured quantity.

    Attributes:
        ranks: Of the job.
        what: Its name.
        value: How much.
        unit: Of the value.
        extrapolated: Whether it follows from fewer ranks.
    """

    ranks: int
    what: str
    value: float
    unit: str
    extrapolated: bool = False

    def __str__(self) -> str:
        sign = "~" if self.extrapolated else " "
        return f"{self.ranks:6,}  {self.what:52} {sign}{self.value:12,.3f} {self.unit}"


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of the model by name."""
    found: dict[str, tuple[int, ...]] = {
        "embed": (VOCABULARY, WIDTH),
        "head": (VOCABULARY, WIDTH),
        "norm": (WIDTH,),
    }
    block = {
        "query": (WIDTH, WIDTH),
        "key": (KEYS, WIDTH),
        "value": (KEYS, WIDTH),
        "output": (WIDTH, WIDTH),
        "gate": (HIDDEN, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
        "attention_norm": (WIDTH,),
        "network_norm": (WIDTH,),
    }
    for index in range(DEPTH):
        found |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return found


@contextmanager
def place(rank: int, ranks: int) -> Iterator[None]:
    """Take the place of one rank of a simulated job."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def timed(action: Callable[[], T]) -> tuple[T, float, float]:
    """Return what an action returns, its seconds, and the megabytes that this process has grown by."""
    gc.collect()
    before, begin = _resident(), time.perf_counter()
    result = action()
    return result, time.perf_counter() - begin, max(_resident() - before, 0.0)


def _resident() -> float:
    pages = (
        int(Path("/proc/self/statm").read_text().split()[1])
        if Path("/proc/self/statm").exists()
        else None
    )
    return (
        pages * resource.getpagesize() / 1e6
        if pages
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    )


def degrees(ranks: int) -> dict[str, int]:
    """Return the degrees of the axes of a job."""
    return {"replicate": max(ranks // SHARDS, 1), "shard": min(ranks, SHARDS)}


def state(topology: Topology) -> dict[str, Any]:
    """Return the state that one rank saves, on the meta device."""
    mesh, active = topology.mesh("replicate", "shard"), topology.active("replicate", "shard")
    degree = topology.axes.degrees["shard"]
    place = topology.coordinate["shard"]
    placements = [Shard(0) if axis == "shard" else Replicate() for axis in active]

    def sharded(shape: tuple[int, ...]) -> Tensor:
        rows = -(-shape[0] // degree)
        mine = min(max(shape[0] - place * rows, 0), rows)
        stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        local = torch.empty((mine, *shape[1:]), device="meta")
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    model = {name: sharded(shape) for name, shape in shapes().items()}
    moments = {
        name: {"exp_avg": sharded(shape), "exp_avg_sq": sharded(shape), "step": torch.zeros(())}
        for name, shape in shapes().items()
    }
    return {
        "format_version": 1,
        "model": model,
        "optimizer": {"state": moments},
        "ranks": {str(topology.optimizer.rank): {}},
    }


class CountBytes(TorchDispatchMode):
    """Counts the bytes that this rank hands to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def measure_start(ranks: int) -> list[Figure]:
    """Return what the last rank pays for its place in the job and for its share of the data, and what an update agrees on."""
    with place(ranks - 1, ranks):
        topology, seconds, memory = timed(lambda: Topology(degrees(ranks)))
        found = [Figure(ranks, "topology", seconds, "s"), Figure(ranks, "topology", memory, "MB")]
        sampler = PositionedBatchSampler(
            SAMPLES,
            Share(rank=ranks - 1, world_size=ranks),
            Division.of_batches(8, ranks),
            shuffle=True,
        )
        sampler.consumed = SAMPLES // 2 // (8 * ranks) * 8 * ranks
        _, seconds, memory = timed(lambda: next(iter(sampler)))
        found += [Figure(ranks, "first batch in the middle of 10^9 samples", seconds * 1e3, "ms")]
        found += [Figure(ranks, "first batch in the middle of 10^9 samples", memory, "MB")]
        with CountBytes() as counted:
            StepSync(topology.optimizer, torch.device("cpu")).reduce(StepTotals(1.0, 1.0, 1.0, 0.0))
        return [*found, Figure(ranks, "an update agrees on", float(counted.bytes), "bytes")]


def local_plan(rank: int, ranks: int) -> tuple[SavePlan, SavePlanner]:
    """Return what one rank plans to save."""
    planner = SavePlanner()
    planner.set_up_planner(state(Topology(degrees(ranks))), is_coordinator=rank == 0)
    return planner.create_local_plan(), planner


def measure_local_plan(rank: int, ranks: int) -> list[Figure]:
    """Return what one rank plans and sends."""
    who = "rank 0" if rank == 0 else "the last rank"
    with place(rank, ranks):
        planner = SavePlanner()
        planner.set_up_planner(state(Topology(degrees(ranks))), is_coordinator=rank == 0)
        plan, seconds, _ = timed(planner.create_local_plan)
    return [
        Figure(ranks, f"{who} plans a save", seconds, "s"),
        Figure(ranks, f"{who} sends for a save", len(pickle.dumps(plan)) / 1e3, "kB"),
    ]


def plan_of(plan: SavePlan, rank: int, ranks: int) -> SavePlan:
    """Return the plan of another rank of the same group of shards, derived from that of rank 0."""
    return replace(
        plan,
        items=[_moved(item, rank, ranks) for item in plan.items if item.tensor_data is not None],
    )


def _moved(item: WriteItem, rank: int, ranks: int) -> WriteItem:
    data = item.tensor_data
    assert data is not None
    rows = -(-data.size[0] // ranks) if data.size else 0
    if not data.size or data.chunk.sizes[0] == data.size[0] > rows:
        return item
    begin = min(rank * rows, data.size[0])
    offsets = torch.Size([begin, *data.chunk.offsets[1:]])
    sizes = torch.Size([min(rows, data.size[0] - begin), *data.chunk.sizes[1:]])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    return replace(
        item, index=replace(item.index, offset=offsets), tensor_data=replace(data, chunk=chunk)
    )


def measure_coordinator() -> dict[str, list[float]]:
    """Return what rank 0 pays for the plans of all, and a rank for reading them, by number of ranks in `MEASURED`."""
    found: dict[str, list[float]] = {}
    for ranks in MEASURED:
        with place(0, ranks):
            plan, planner = local_plan(0, ranks)
        with place(ranks - 1, ranks):
            last = local_plan(ranks - 1, ranks)[0]
        derived = plan_of(plan, ranks - 1, ranks)
        assert sorted(map(str, derived.items)) == sorted(
            map(str, (i for i in last.items if i.tensor_data is not None))
        )
        plans = [plan, *(plan_of(plan, rank, ranks) for rank in range(1, ranks))]
        # As they arrive: each plan with its own strings and sizes.
        plans, _, memory = timed(partial(_received, plans))
        (_, metadata), seconds, grown = timed(partial(planner.create_global_plan, plans))
        _, reading, _ = timed(partial(plan_reading, planner.state_dict, metadata))
        values = {
            "rank 0 makes the global plan of a save": seconds,
            "rank 0 holds the plans of a save": memory + grown,
            "a rank plans what it reads": reading,
            "rank 0 writes .metadata": len(pickle.dumps(metadata)) / 1e6,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _received(plans: list[SavePlan]) -> list[SavePlan]:
    return [pickle.loads(pickle.dumps(plan)) for plan in plans]


def plan_reading(flat: dict[str, Any], metadata: Metadata) -> Any:
    """Return what a rank plans to read from a checkpoint of the same layout."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.state_dict, planner.metadata = dict(flat), metadata
    known = {
        n
        for n, entry in metadata.state_dict_metadata.items()
        if not isinstance(entry, BytesStorageMetadata)
    }
    planner.state_dict = {
        name: value for name, value in planner.state_dict.items() if name in known
    }
    return planner.create_local_plan()


def extrapolated(values: list[float], ranks: int) -> float:
    """Return the value at a number of ranks, on the line through the two largest that were measured."""
    slope = (values[-1] - values[-2]) / (MEASURED[-1] - MEASURED[-2])
    return values[-1] + slope * (ranks - MEASURED[-1])


def main() -> None:
    """Print the figures, and write them as JSON when asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    asked = parser.parse_args()
    figures = []
    for ranks in RANKS:
        figures += [
            *measure_start(ranks),
            *measure_local_plan(0, ranks),
            *measure_local_plan(ranks - 1, ranks),
        ]
    units = {"rank 0 holds the plans of a save": "MB", "rank 0 writes .metadata": "MB"}
    for what, values in measure_coordinator().items():
        unit = units.get(what, "s")
        figures += [Figure(ranks, what, value, unit) for ranks, value in zip(MEASURED, values)]
        for ranks in RANKS:
            # Every rank sends its plan; of replicas one writes each piece, so that a checkpoint has as many as there are shards.
            pieces = ranks if what.endswith("of a save") else min(ranks, SHARDS)
            figures.append(
                Figure(ranks, what, extrapolated(values, pieces), unit, extrapolated=True)
            )
    print("\n".join(map(str, figures)))
    if asked.json:
        asked.json.write_text(json.dumps([vars(figure) for figure in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
