"""What an evaluation costs beside a loop written by hand: loss and accuracy, exact over ragged batches.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py                  # about half a minute
    OMP_NUM_THREADS=1 python benchmarks/evaluation.py --rounds 10 --json evaluation.json

The models and data of `step_cost.py`: first batches in a list, then a user's `Dataset`, the loop through a `StatefulDataLoader`, the runner
through the loader that it builds. The loop by hand adds up loss and correct predictions on the device and reads them once. Passes are
interleaved and each round of the runner is divided by that of the loop; medians, with the quartiles as spread.
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
from workload import COMPUTE, OVERHEAD, Samples, Workload, make_batches, make_model

import danling as dl

WORKLOADS = {"10k parameters": (OVERHEAD, 20), "1.3M parameters": (COMPUTE, 1)}
"""Sizes, and the passes that are timed together."""


def by_hand(workload: Workload, batches: Any) -> Callable[[], tuple[float, float]]:
    """Return a function that evaluates one pass."""
    model, criterion = make_model(workload), nn.CrossEntropyLoss()

    def evaluate() -> tuple[float, float]:
        model.eval()
        loss, correct, count = torch.zeros(()), torch.zeros(()), 0
        with torch.no_grad():
            for input, target in batches:
                pred = model(input)
                loss += criterion(pred, target) * len(target)
                correct += (pred.argmax(-1) == target).sum()
                count += len(target)
        return loss.item() / count, correct.item() / count

    return evaluate


class Benchmarked(dl.TorchRunner):
    """Evaluates the batches that it is given.

    Args:
        config: Settings.
        workload: Size of the model.
        data: Batches in a list, or a dataset.
    """

    def __init__(self, config: dict[str, Any], workload: Workload, data: Any) -> None:
        super().__init__(config)
        self.model = make_model(workload)
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}
        if isinstance(data, Samples):
            self.datasets = {"val": data}
        else:
            self.dataloaders = {"val": data}


def by_runner(workload: Workload, data: Any, root: str) -> Callable[[], tuple[float, float]]:
    """Return a function that evaluates one pass."""
    config = {"seed": 0, "log": False, "workspace_root": root, "dataloader": {"batch_size": workload.batch_size}}
    runner = Benchmarked(config, workload, data)

    def evaluate() -> tuple[float, float]:
        figures = runner.evaluate_epoch("val")
        return figures["loss"], figures["acc"]

    return evaluate


def measure(
    ways: dict[str, Callable[[], Any]], rounds: int, passes: int, batches: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return microseconds a batch, by way and round; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, evaluate in ways.items():
            begin = clock()
            for _ in range(passes):
                evaluate()
            if round_:
                times[name].append((clock() - begin) / passes / batches * 1e6)
    return times


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--only", default="", help="measure where the title has this in it, such as 10k or Dataset")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count time of the processor, on a machine that is busy"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    clock = time.process_time if asked.cpu_time else time.perf_counter
    results: dict[str, Any] = {}
    for source in ("batches in a list", "a Dataset"):
        for size, (workload, passes) in WORKLOADS.items():
            if asked.only in (title := f"{size}, {source}"):
                results[title] = compare(workload, passes, asked.rounds, clock, from_dataset=source == "a Dataset")
                show(title, results[title])
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


def compare(
    workload: Workload, passes: int, rounds: int, clock: Callable[[], float], *, from_dataset: bool
) -> dict[str, Any]:
    """Return quartiles of microseconds a batch by way, and the median of the ratios of a round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    loader = StatefulDataLoader(data, workload.batch_size) if from_dataset else batches
    with tempfile.TemporaryDirectory() as root:
        ways = {"by hand": by_hand(workload, loader), "runner": by_runner(workload, data, root)}
        assert all(abs(a - b) < 1e-4 for a, b in zip(*(way() for way in ways.values()))), "the figures differ"
        times = measure(ways, rounds, passes, len(batches), clock)
    ratio = statistics.median(b / a for a, b in zip(times["by hand"], times["runner"]))
    return {"us": {name: statistics.quantiles(values, n=4) for name, values in times.items()}, "ratio": ratio}


def show(title: str, result: dict[str, Any]) -> None:
    """Print one comparison."""
    print(title)
    for name, (low, median, high) in result["us"].items():
        print(f"  {name:10} {median:8.1f} us a batch ({low:.0f}-{high:.0f})")
    print(f"  x {result['ratio']:.3f}", flush=True)


if __name__ == "__main__":
    main()
