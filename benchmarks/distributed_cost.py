"""What an update costs on two processes, beside the same done by hand: DDP, and parameters sharded by FSDP2.

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
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import WORKLOADS, Samples, Workload, make_batches, make_model, make_optimizer

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


def updates(workload: Workload, layout: str, samples: Samples, *, weighs: bool) -> Iterator[None]:
    """Train pass after pass by hand, yielding after each update."""
    model, criterion = wrapped(workload, layout), nn.CrossEntropyLoss()
    optimizer, scheduler = make_optimizer(model)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, drop_last=True)
    batches = StatefulDataLoader(samples, workload.batch_size, sampler=sampler, drop_last=True)
    epoch, ranks = 0, dist.get_world_size()
    while True:
        sampler.set_epoch(epoch)
        for input, target in batches:
            loss = criterion(model(input), target)
            if weighs:
                weight = torch.tensor(float(len(target)), dtype=torch.float64)
                dist.all_reduce(weight)
                loss = loss * (len(target) * ranks / weight.item())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield
        epoch += 1


def measure(layout: str, workload: Workload, rounds: int, root: str, clock: pairs.Clock) -> pairs.Times:
    """Return microseconds an update, by way and round. Called on both processes."""
    samples = Samples(make_batches(workload))
    kind: Any = Benchmarked if layout == "DDP" else OnMesh
    settings: dict[str, Any] = {} if layout == "DDP" else {"parallel": {"axes": {"shard": 2}}}
    ways = {
        # The runner first: it makes the process group.
        "runner": by_runner(workload, samples, root, kind, **settings),
        "by hand": blocks(updates(workload, layout, samples, weighs=False), workload),
        BY_HAND: blocks(updates(workload, layout, samples, weighs=True), workload),
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
    parser.add_argument("--only", default="", help="measure where the title has this in it, such as DDP or 10k")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        run_on_ranks(_on_rank, root, asked, world_size=2)


if __name__ == "__main__":
    main()
