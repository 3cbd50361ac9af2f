"""What an update costs on the stack `accelerate`, beside a loop of Accelerate's by hand and beside the stack `ddp`.

    OMP_NUM_THREADS=1 python benchmarks/accelerate_cost.py                     # about two minutes
    OMP_NUM_THREADS=1 python benchmarks/accelerate_cost.py --rounds 5 --json accelerate_cost.json

The workloads of `step_cost.py`: MLPs of ten thousand and of 1.3 million parameters, clipping at 1.0 and a schedule, over batches in
a list and over a `Dataset`. The loop by hand is that of Accelerate's documentation (`prepare`, `accumulate`, `backward`,
`clip_grad_norm_`), with model, optimizer, schedule and loader prepared. Blocks of updates are interleaved and each one is divided by the
loop's of the same round; medians, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_cost import WORKLOADS, Benchmarked, by_runner, interleaved, summarize
from torch import nn
from torch.utils.data import DataLoader
from workload import Samples, Workload, make_batches, make_model, make_optimizer

import danling as dl

BY_HAND = "Accelerate by hand"


class OnAccelerate(Benchmarked, dl.AccelerateRunner):
    """The same runner through Accelerate."""


def by_hand(workload: Workload, batches: Any) -> Callable[[], None]:
    """Return a function that makes one block of updates as Accelerate's documentation shows."""
    from accelerate import Accelerator

    accelerator, criterion, model = Accelerator(cpu=True), nn.CrossEntropyLoss(), make_model(workload)
    model, optimizer, scheduler = accelerator.prepare(model, *make_optimizer(model))
    if isinstance(batches, Samples):
        batches = accelerator.prepare(DataLoader(batches, workload.batch_size, shuffle=True, drop_last=True))
    model.train()

    def block() -> None:
        steps = 0
        while steps < workload.block:
            for input, target in batches:
                with accelerator.accumulate(model):
                    loss = criterion(model(input), target)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                steps += 1
                if steps == workload.block:
                    break

    return block


def measure(
    workload: Workload, rounds: int, root: str, clock: Callable[[], float], *, from_dataset: bool
) -> dict[str, list[float]]:
    """Return microseconds an update, by way and round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    ways = {
        # The runner first: it makes the accelerator whose state the loop by hand shares.
        "stack accelerate": by_runner(workload, data, f"{root}/accelerate", OnAccelerate),
        "stack ddp": by_runner(workload, data, f"{root}/ddp"),
        BY_HAND: by_hand(workload, data),
    }
    return interleaved(ways, workload.block, rounds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--only", default="", help="measure where the title has this in it, such as 10k or Dataset")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count time of the processor, on a machine that is busy"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    figures = {}
    for source in ("batches in a list", "a Dataset"):
        for size, workload in WORKLOADS.items():
            title = f"{size}, {source}"
            if arguments.only not in title:
                continue
            with tempfile.TemporaryDirectory() as root:
                times = measure(workload, arguments.rounds, root, clock, from_dataset=source == "a Dataset")
            figures[title] = summarize(times, BY_HAND)
            print(title)
            for way, row in figures[title].items():
                spread = f"{row['low_us']:,.0f} to {row['high_us']:,.0f}"
                print(f"  {way:20} {row['median_us']:9,.0f} us  ({spread})  {row['ratio']:.2f} of Accelerate by hand")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
