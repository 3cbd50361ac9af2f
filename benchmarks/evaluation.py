"""What an evaluation costs compared with a loop written by hand: loss and accuracy, exact over ragged batches.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py                  # about half a minute
    OMP_NUM_THREADS=1 python benchmarks/evaluation.py --rounds 10 --json evaluation.json

The models and data of `step_cost.py`: first batches in a list, then a user's `Dataset`, the loop through a `StatefulDataLoader`, the runner
through the loader that it builds. The loop by hand adds up loss and correct predictions on the device and reads them once. Passes are
interleaved and each round of the runner is divided by that of the loop; medians, with the quartiles as spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pairs
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import Samples, Workload, make_batches, make_model

import danling as dl

BY_HAND = "by hand"


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
    config = {
        "seed": 0,
        "log": False,
        "workspace_root": root,
        "dataloader": {"batch_size": workload.batch_size},
    }
    runner = Benchmarked(config, workload, data)

    def evaluate() -> tuple[float, float]:
        figures = runner.evaluate_epoch("val")
        return figures["loss"], figures["acc"]

    return evaluate


def passes(evaluate: Callable[[], object], number: int) -> Callable[[], None]:
    """Return a function that evaluates so many passes."""

    def block() -> None:
        for _ in range(number):
            evaluate()

    return block


def measure(
    workload: Workload, rounds: int, root: str, clock: pairs.Clock, *, from_dataset: bool
) -> pairs.Times:
    """Return microseconds a batch, by way and round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    loader = StatefulDataLoader(data, workload.batch_size) if from_dataset else batches
    ways = {BY_HAND: by_hand(workload, loader), "runner": by_runner(workload, data, root)}
    assert all(abs(a - b) < 1e-4 for a, b in zip(*(way() for way in ways.values()))), (
        "the figures differ"
    )
    number = max(1, workload.block // len(batches))
    timed = {name: passes(way, number) for name, way in ways.items()}
    return pairs.interleaved(timed, number * len(batches), rounds, clock)


if __name__ == "__main__":
    pairs.main(__doc__ or "", measure, against=BY_HAND, unit="a batch")
