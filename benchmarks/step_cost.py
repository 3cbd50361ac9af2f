"""What an update costs beside a loop written by hand, where only overhead counts and where only computing does.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py                   # about four minutes
    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --rounds 5 --json step_cost.json

MLPs of ten thousand parameters with batches of 32 and of 1.3 million with batches of 256, clipping at 1.0 and a schedule, in three ways: a
loop by hand; the runner with the same optimizer and loader; the runner with the optimizer that `OPTIMIZERS` builds. First over batches in a
list, then over a user's `Dataset`: the loop through a `StatefulDataLoader`, the runner through the loader that it builds. Blocks of updates
are interleaved, and each round of the runner is divided by the round of the loop next to it, so that a change of the machine's speed hits
both. Figures are medians over the rounds, with the quartiles as spread. The loop by hand neither looks at its loss nor checks it.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import COMPUTE, OVERHEAD, Samples, Workload, make_batches, make_model, make_optimizer

import danling as dl

WORKLOADS = {"10k parameters": OVERHEAD, "1.3M parameters": COMPUTE}


def by_hand(workload: Workload, batches: Any) -> Callable[[], None]:
    """Return a function that makes one block of updates."""
    model, criterion = make_model(workload), nn.CrossEntropyLoss()
    optimizer, scheduler = make_optimizer(model)
    model.train()

    def block() -> None:
        steps = 0
        while steps < workload.block:
            for input, target in batches:
                loss = criterion(model(input), target)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                steps += 1
                if steps == workload.block:
                    break

    return block


class Benchmarked(dl.TorchRunner):
    """The runner over a loader of the user's own or a dataset, and by default with an optimizer and a schedule of the user's.

    Args:
        config: Settings.
        workload: Size of the model.
        data: Batches in a list, or a dataset.
    """

    def __init__(self, config: dict[str, Any], workload: Workload, data: Any) -> None:
        super().__init__(config)
        self.model = make_model(workload)
        self.criterion = nn.CrossEntropyLoss()
        if isinstance(data, Samples):
            self.datasets = {"train": data}
        else:
            self.dataloaders = {"train": data}
        if "optim" not in config:
            self.optimizer, self.scheduler = make_optimizer(self.model)


def by_runner(
    workload: Workload, data: Any, root: str, kind: type[Benchmarked] = Benchmarked, **settings: Any
) -> Callable[[], None]:
    """Return a function that makes one block of updates through `train_steps`."""
    config = {
        "seed": 0,
        "steps": 0,
        "max_grad_norm": 1.0,
        "log": False,
        "log_interval": workload.block,
        "evaluate_interval": 10**9,
        "workspace_root": root,
        "checkpoint": {"load_only": True},
        "dataloader": {"batch_size": workload.batch_size},
        **settings,
    }
    runner = kind(config, workload, data)

    def block() -> None:
        runner.config.steps = (runner.config.steps or 0) + workload.block
        runner.train_steps()

    return block


def measure(
    workload: Workload, rounds: int, root: str, clock: Callable[[], float], *, from_dataset: bool
) -> dict[str, list[float]]:
    """Return microseconds an update, by way and round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    loader = StatefulDataLoader(data, workload.batch_size, shuffle=True, drop_last=True) if from_dataset else batches
    optim = {"type": "adamw", "lr": 1e-3}
    scheduler = {"type": "linearlr", "start_factor": 1.0, "end_factor": 0.1, "total_iters": 100_000}
    ways = {
        "by hand": by_hand(workload, loader),
        "runner, own optimizer": by_runner(workload, data, f"{root}/own"),
        "runner, OPTIMIZERS": by_runner(workload, data, f"{root}/built", optim=optim, scheduler=scheduler),
    }
    return interleaved(ways, workload.block, rounds, clock)


def interleaved(
    ways: dict[str, Callable[[], None]], block: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return microseconds an update, by way and round, of ways that take turns to make a block of updates."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, make in ways.items():
            begin = clock()
            make()
            if round_:  # the first one warms up
                times[name].append((clock() - begin) / block * 1e6)
    return times


def summarize(times: dict[str, list[float]], against: str = "by hand") -> dict[str, dict[str, float]]:
    """Return median and quartiles by way, and the median of the ratios to one way in the same round."""
    baseline = times[against]
    result = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(value / base for value, base in zip(values, baseline))
        result[name] = {"median_us": median, "low_us": low, "high_us": high, "ratio": ratio}
    return result


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
    figures = {}
    for source in ("batches in a list", "a Dataset"):
        for size, workload in WORKLOADS.items():
            title = f"{size}, {source}"
            if arguments.only not in title:
                continue
            with tempfile.TemporaryDirectory() as root:
                clock = time.process_time if arguments.cpu_time else time.perf_counter
                times = measure(workload, arguments.rounds, root, clock, from_dataset=source == "a Dataset")
            figures[title] = summarize(times)
            print(title)
            for name, row in figures[title].items():
                spread = f"{row['low_us']:.0f}-{row['high_us']:.0f}"
                print(f"  {name:24} {row['median_us']:8.1f} us an update ({spread})   x {row['ratio']:.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
