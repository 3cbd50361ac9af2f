"""What an update costs compared with a loop written by hand, where only overhead counts and where only computing does.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py                   # about four minutes
    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --rounds 5 --json step_cost.json

MLPs of ten thousand parameters with batches of 32 and of 1.3 million with batches of 256, clipping at 1.0 and a schedule, in three ways: a
loop by hand; the runner with the same optimizer and loader; the runner with the optimizer that `OPTIMIZERS` builds. First over batches in a
list, then over a user's `Dataset`: the loop through a `StatefulDataLoader`, the runner through the loader that it builds. Blocks of updates
are interleaved, and each round of the runner is divided by the round of the loop next to it, so that a change of the machine's speed hits
both. Figures are medians over the rounds, with the quartiles as spread. The loop by hand neither looks at its loss nor checks it.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --breakdown       # a minute: what an update of `peers.py` spends its time on
    python benchmarks/library_calls.py                                 # a number without noise: the library's Python calls in an update
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

import pairs
from torchdata.stateful_dataloader import StatefulDataLoader
from workload import (
    SMALL,
    Samples,
    Workload,
    make_batches,
    make_criterion,
    make_model,
    make_optimizer,
    updates_by_hand,
)

import danling as dl
from danling.data.keyed import KeyedDataset
from danling.data.live import LiveLoader
from danling.data.randomness import Generators
from danling.training import Window
from danling.training.batch_weights import BatchLoss
from danling.training.keys import RandomKeys
from danling.training.update import UpdateStep
from danling.utils.observers import Observers

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
        self.criterion = make_criterion(workload)
        if isinstance(data, Samples):
            self.datasets = {"train": data}
        else:
            self.dataloaders = {"train": data}
        if "optim" not in config:
            self.optimizer, self.scheduler = make_optimizer(self.model, workload)


def blocks(updates: Iterator[None], workload: Workload) -> Callable[[], None]:
    """Return a function that makes one block of updates."""

    def block() -> None:
        for _ in islice(updates, workload.block):
            pass

    return block


def settings_of(workload: Workload, root: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a run that neither saves nor evaluates, and logs once a block."""
    return {
        "seed": 0,
        "max_grad_norm": 1.0,
        "log": False,
        "log_interval": workload.block,
        "evaluate_interval": 10**9,
        "workspace_root": root,
        "checkpoint": {"load_only": True},
        **more,
    }


def by_runner(
    workload: Workload, data: Any, root: str, kind: type[Benchmarked] = Benchmarked, **settings: Any
) -> Callable[..., None]:
    """Return a function that makes one block of updates, or so many, through `train_steps`."""
    settings = {"steps": 0, "dataloader": {"batch_size": workload.batch_size}, **settings}
    runner = kind(settings_of(workload, root, **settings), workload, data)

    def block(updates: int = workload.block) -> None:
        runner.config.steps = (runner.config.steps or 0) + updates
        runner.train_steps()

    return block


def measure(
    workload: Workload, rounds: int, root: str, clock: pairs.Clock, *, from_dataset: bool
) -> pairs.Times:
    """Return microseconds an update, by way and round."""
    batches = make_batches(workload)
    data = Samples(batches) if from_dataset else batches
    loader = (
        StatefulDataLoader(data, workload.batch_size, shuffle=True, drop_last=True)
        if from_dataset
        else batches
    )
    optim = {"type": "adamw", "lr": 1e-3}
    scheduler = {"type": "linearlr", "start_factor": 1.0, "end_factor": 0.1, "total_iters": 100_000}
    ways = {
        BY_HAND: blocks(updates_by_hand(make_model(workload), loader), workload),
        "runner, own optimizer": by_runner(workload, data, f"{root}/own"),
        "runner, OPTIMIZERS": by_runner(
            workload, data, f"{root}/built", optim=optim, scheduler=scheduler
        ),
    }
    return pairs.interleaved(ways, workload.block, rounds, clock)


# What an update spends its time on

PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "read": ((KeyedDataset, "__getitems__"), (LiveLoader, "_fetch")),
    "keys": (
        (RandomKeys, "begin_micro_batch"),
        (RandomKeys, "begin_update"),
        (Generators, "seed"),
    ),
    "weigh": ((BatchLoss, "weigh"), (Window, "begin_microbatch")),
    "forward and backward": ((dl.TorchRunner, "train_step"),),
    "sync": ((UpdateStep, "agree"),),
    "norm and clipping": (
        (dl.TorchRunner, "complete_gradients"),
        (dl.TorchRunner, "unscale_gradients"),
        (dl.TorchRunner, "gradient_norm"),
        (dl.TorchRunner, "clip_gradients"),
    ),
    "decide": (
        (UpdateStep, "decide"),
        (UpdateStep, "make"),
        (UpdateStep, "_conclude"),
        (UpdateStep, "end_batches"),
    ),
    "step": (
        (dl.TorchRunner, "optimizer_step"),
        (dl.TorchRunner, "zero_gradients"),
        (UpdateStep, "_step_schedule"),
    ),
    "observers": ((Observers, "notify"),),
}
"""Methods of the library by part of an update. What one of them calls of another part counts there."""


class PartTimes:
    """Measures parts of an update: the time in the methods of each, without that in methods of other parts.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: pairs.Clock) -> None:
        self.seconds = dict.fromkeys([*PARTS, "loop"], 0.0)
        self._clock = clock
        self._open = ["loop"]
        self._since = clock()

    def enter(self, part: str) -> None:
        """Count for a part from now on."""
        now = self._clock()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
        self._open.append(part)

    def leave(self) -> None:
        """Count for the part before again."""
        now = self._clock()
        self.seconds[self._open.pop()] += now - self._since
        self._since = now

    def measure(self, owner: type, name: str, part: str) -> None:
        """Measure a method from now on."""
        function = getattr(owner, name)

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, measured)


def breakdown(rounds: int, clock: pairs.Clock) -> dict[str, float]:
    """Print and return the microseconds of an update by part: over a `Dataset`, the median over the rounds."""
    times = PartTimes(clock)
    for part, methods in PARTS.items():
        for owner, name in methods:
            times.measure(owner, name, part)
    rows: dict[str, list[float]] = {part: [] for part in times.seconds}
    with tempfile.TemporaryDirectory() as root:
        train = by_runner(SMALL, Samples(make_batches(SMALL)), root)
        train()
        for _ in range(rounds):
            before = dict(times.seconds)
            times.enter("loop")
            train()
            times.leave()
            for part, seconds in times.seconds.items():
                rows[part].append((seconds - before[part]) / SMALL.block * 1e6)
    figures = {part: statistics.median(values) for part, values in rows.items()}
    for part, microseconds in figures.items():
        print(f"  {part:22} {microseconds:9,.1f} us")
    print(
        f"  {'in all':22} {sum(figures.values()):9,.1f} us, with the clock that is read twice for each method"
    )
    return figures


if __name__ == "__main__":
    pairs.main(__doc__ or "", measure, against=BY_HAND, breakdown=breakdown)
