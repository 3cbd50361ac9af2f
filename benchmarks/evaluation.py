"""What an evaluation costs beside a loop written by hand: loss and accuracy, exact over ragged batches.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py                  # about half a minute
    OMP_NUM_THREADS=1 python benchmarks/evaluation.py --rounds 10 --json evaluation.json

The model and batches of `step_cost.py`. The loop by hand adds up loss and correct predictions on the device and reads them once. Passes are
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
from workload import COMPUTE, OVERHEAD, Batches, Workload, make_batches, make_model

import danling as dl

WORKLOADS = {"10k parameters": (OVERHEAD, 20), "1.3M parameters": (COMPUTE, 1)}
"""Sizes, and the passes that are timed together."""


def by_hand(workload: Workload, batches: Batches) -> Callable[[], tuple[float, float]]:
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
        batches: The loader.
    """

    def __init__(self, config: dict[str, Any], workload: Workload, batches: Batches) -> None:
        super().__init__(config)
        self.model = make_model(workload)
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}
        self.dataloaders = {"val": batches}


def by_runner(workload: Workload, batches: Batches, root: str) -> Callable[[], tuple[float, float]]:
    """Return a function that evaluates one pass."""
    runner = Benchmarked({"seed": 0, "log": False, "workspace_root": root}, workload, batches)

    def evaluate() -> tuple[float, float]:
        figures = runner.evaluate_epoch("val")
        return figures["loss"], figures["acc"]

    return evaluate


def measure(ways: dict[str, Callable[[], Any]], rounds: int, passes: int, batches: int) -> dict[str, list[float]]:
    """Return microseconds a batch, by way and round; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, evaluate in ways.items():
            begin = time.perf_counter()
            for _ in range(passes):
                evaluate()
            if round_:
                times[name].append((time.perf_counter() - begin) / passes / batches * 1e6)
    return times


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    results: dict[str, Any] = {}
    for title, (workload, passes) in WORKLOADS.items():
        batches = make_batches(workload)
        with tempfile.TemporaryDirectory() as root:
            ways = {"by hand": by_hand(workload, batches), "runner": by_runner(workload, batches, root)}
            assert all(abs(a - b) < 1e-4 for a, b in zip(*(way() for way in ways.values()))), "the figures differ"
            times = measure(ways, asked.rounds, passes, len(batches))
        ratio = statistics.median(b / a for a, b in zip(times["by hand"], times["runner"]))
        results[title] = {
            "us": {name: statistics.quantiles(values, n=4) for name, values in times.items()},
            "ratio": ratio,
        }
        print(title)
        for name, (low, median, high) in results[title]["us"].items():
            print(f"  {name:10} {median:8.1f} us a batch ({low:.0f}-{high:.0f})")
        print(f"  x {ratio:.3f}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
