"""What an update costs on two processes, compared with a loop by hand: DDP, and parameters sharded by FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/distributed_cost.py                  # about four minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/distributed_cost.py --rounds 5 --only FSDP --json distributed_cost.json

The models of `step_cost.py` over a user's `Dataset`, clipping at 1.0 and a schedule. *By hand* is the loop of torch's documentation: a
`DistributedSampler`, and the mean of the ranks' means, which is wrong where their batches differ in size. *Weighed* adds one reduction of
the number of samples each update, which the right gradient needs. The runner reduces its weights with its other decisions. Blocks of
updates are interleaved on both processes; each round is divided by the round of the weighed loop next to it. Times are rank 0's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import pairs
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from step_cost import Benchmarked, blocks, by_runner
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import WORKLOADS, Samples, Workload, make_batches, make_model, updates_by_hand

import danling as dl

LAYOUTS = ("DDP", "FSDP")
BY_HAND = "weighed"


class OnMesh(Benchmarked, dl.ParallelRunner):
    """The same runner with its parameters sharded."""


def wrapped(workload: Workload, layout: str) -> nn.Module:
    """Return the model as a loop by hand distributes it."""
    model = make_model(workload)
    if layout == "DDP":
        return DistributedDataParallel(model)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


class Passes:
    """The passes over the share of a rank, each in its own order.

    Args:
        workload: The size of batches.
        samples: The dataset.
    """

    def __init__(self, workload: Workload, samples: Samples) -> None:
        self.sampler: DistributedSampler[Any] = DistributedSampler(samples, drop_last=True)
        self.loader = StatefulDataLoader(
            samples, workload.batch_size, sampler=self.sampler, drop_last=True
        )
        self.epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        return iter(self.loader)


def weighed(pred: Tensor, target: Tensor) -> Tensor:
    """Return the share of this rank in the mean over the samples of all ranks, as DDP and FSDP average it."""
    weight = torch.tensor(float(len(target)), dtype=torch.float64)
    dist.all_reduce(weight)
    return cross_entropy(pred, target) * (len(target) * dist.get_world_size() / weight.item())


def measure(
    layout: str, workload: Workload, rounds: int, root: str, clock: pairs.Clock
) -> pairs.Times:
    """Return microseconds an update, by way and round. Called on both processes."""
    samples = Samples(make_batches(workload))
    kind: Any = Benchmarked if layout == "DDP" else OnMesh
    settings: dict[str, Any] = {} if layout == "DDP" else {"parallel": {"axes": {"shard": 2}}}
    ways = {
        # The runner first: it makes the process group.
        "runner": by_runner(workload, samples, root, kind, **settings),
        "by hand": blocks(
            updates_by_hand(wrapped(workload, layout), Passes(workload, samples)), workload
        ),
        BY_HAND: blocks(
            updates_by_hand(wrapped(workload, layout), Passes(workload, samples), weighed), workload
        ),
    }
    return pairs.interleaved(ways, workload.block, rounds, clock)


def _on_rank(rank: int, root: str, asked: argparse.Namespace) -> None:
    clock = pairs.prepared(asked)
    figures = {}
    for layout in LAYOUTS:
        for size, workload in WORKLOADS.items():
            if asked.only not in (title := f"{layout}, {size}"):
                continue
            times = measure(layout, workload, asked.rounds, f"{root}/{title}", clock)
            figures[title] = pairs.summarize(times, BY_HAND)
            if rank == 0:
                pairs.show(title, figures[title], BY_HAND, "an update")
    if rank == 0 and asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Start both processes, which measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    pairs.add_options(parser, rounds=10)
    parser.add_argument(
        "--only", default="", help="measure where the title has this in it, such as DDP or 10k"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        run_on_ranks(_on_rank, root, asked, world_size=2)


if __name__ == "__main__":
    main()
