"""What an update costs compared with a loop written by hand, where only overhead counts and where only computing does.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py                   # about four minutes
    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --rounds 5 --json step_cost.json

MLPs of ten thousand parameters with batches of 32 and of 1.3 million with batches of 256, clipping at 1.0 and a schedule, in three ways: a
loop by hand; the runner with the same optimizer and loader; the runner with the optimizer that `OPTIMIZERS` builds. First over batches in a
list, then over a user's `Dataset`: the loop through a `StatefulDataLoader`, the runner through the loader that it builds. Blocks of updates
are interleaved, and each round of the runner is divided by the round of the loop next to it, so that a change of the machine's speed hits
both. Figures are medians over the rounds, with the quartiles as spread. The loop by hand neither looks at its loss nor checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pairs
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import Samples, Workload, make_batches, make_model, make_optimizer, updates_by_hand

import danling as dl

BY_HAND = "by hand"


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


def blocks(updates: Iterator[None], workload: Workload) -> Callable[[], None]:
    """Return a function that makes one block of updates."""

    def block() -> None:
        for _ in islice(updates, workload.block):
            pass

    return block


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


def measure(workload: Workload, rounds: int, root: str, clock: pairs.Clock, *, from_dataset: bool) -> pairs.Times:
    """Return microseconds an update, by way and round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    loader = StatefulDataLoader(data, workload.batch_size, shuffle=True, drop_last=True) if from_dataset else batches
    optim = {"type": "adamw", "lr": 1e-3}
    scheduler = {"type": "linearlr", "start_factor": 1.0, "end_factor": 0.1, "total_iters": 100_000}
    ways = {
        BY_HAND: blocks(updates_by_hand(make_model(workload), loader), workload),
        "runner, own optimizer": by_runner(workload, data, f"{root}/own"),
        "runner, OPTIMIZERS": by_runner(workload, data, f"{root}/built", optim=optim, scheduler=scheduler),
    }
    return pairs.interleaved(ways, workload.block, rounds, clock)


if __name__ == "__main__":
    pairs.main(__doc__ or "", measure, against=BY_HAND)
