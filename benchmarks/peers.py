"""The same training in a loop by hand, with this library and with others, side by side in one run.

    OMP_NUM_THREADS=1 python benchmarks/peers.py                        # a quarter of an hour when all peers are installed
    OMP_NUM_THREADS=1 python benchmarks/peers.py --json peers.json --plot peers.png
    OMP_NUM_THREADS=1 python benchmarks/peers.py --cpu-time             # time of the processor: on a machine whose speed varies

Peers that are not installed are named and left out: `pip install pytorch-lightning accelerate transformers pytorch-ignite`.
`--peers Ignite` measures some of them only.

The step: an MLP of 4,910 parameters, batch 32, 128 batches a pass, AdamW as torch builds it, clipping at 1.0, a criterion and a schedule
that are functions of the user's; no logging, no checkpoint. The data comes in three ways: as batches in a list, which leaves the libraries
alone; from a user's `Dataset` through the loader that each library builds or takes (torch's `DataLoader` for the loop by hand); and the
same with two workers. Blocks of updates are interleaved and
every block is divided by the loop's block of the same round and data; what comes before the first hundred updates of a block is not
counted. Time of the processor is that of the training process, without its workers. Import is the time of the statement in a fresh
process that has imported torch. Memory is the peak of a fresh process after 300 updates. Medians and quartiles.

`--page docs/benchmarks.md` puts the figures into its table, and `--readme README.md` into its sentences; with `--cpu-time` both go into the
sentences about time of the processor.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pairs
import torch
from torch import nn
from torch.utils.data import DataLoader
from workload import (
    SMALL,
    Batches,
    Samples,
    make_batches,
    make_criterion,
    make_model,
    make_optimizer,
    updates_by_hand,
    updates_with_accelerate,
)

WARM_UP = 100


@dataclass(frozen=True)
class Feed:
    """Where batches come from.

    Attributes:
        batches: A pass in a list.
        from_dataset: Whether a dataset gives its samples, which a loader makes the batches of.
        num_workers: Processes of the loader.
    """

    batches: Batches
    from_dataset: bool = False
    num_workers: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of a loader of torch, or of one like it."""
        kept = {"persistent_workers": True} if self.num_workers else {}
        return {
            "batch_size": SMALL.batch_size,
            "shuffle": True,
            "drop_last": True,
            "num_workers": self.num_workers,
            **kept,
        }

    def loader(self) -> Any:
        """Return an iterable of the batches of a pass."""
        return (
            DataLoader(Samples(self.batches), **self.settings)
            if self.from_dataset
            else self.batches
        )


FEEDS: dict[str, dict[str, Any]] = {
    "list": {},
    "dataset": {"from_dataset": True},
    "2 workers": {"from_dataset": True, "num_workers": 2},
}

Way = Callable[[Feed, int, str], float]
"""Trains so many updates and returns microseconds an update after the first hundred."""


class Passes:
    """A loader that iterates over a list."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Clock:
    """Notes the time after the first hundred updates and after the last.

    Args:
        steps: Updates of the block.
    """

    of_processor: ClassVar[bool] = False

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.count = 0
        self.begin = self.end = 0.0

    def tick(self) -> None:
        """Count an update."""
        self.count += 1
        if self.count == WARM_UP:
            self.begin = self._now()
        elif self.count == self.steps:
            self.end = self._now()

    @property
    def microseconds(self) -> float:
        """Time of an update."""
        return (self.end - self.begin) / (self.steps - WARM_UP) * 1e6

    def _now(self) -> float:
        return time.process_time() if self.of_processor else time.perf_counter()


def timed(updates: Iterator[None], steps: int) -> float:
    """Make so many updates and return microseconds of one."""
    clock = Clock(steps)
    for _ in islice(updates, steps):
        clock.tick()
    return clock.microseconds


def by_hand(feed: Feed, steps: int, root: str) -> float:
    """Train in a loop."""
    return timed(
        updates_by_hand(make_model(SMALL), feed.loader(), make_criterion(SMALL), SMALL), steps
    )


def danling(feed: Feed, steps: int, root: str) -> float:
    """Train with this library."""
    from danling import TorchRunner

    class Timed(TorchRunner):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.model, self.criterion = make_model(SMALL), make_criterion(SMALL)
            if feed.from_dataset:
                self.datasets = {"train": Samples(feed.batches)}
            else:
                self.dataloaders = {"train": feed.batches}
            self.optimizer, self.scheduler = make_optimizer(self.model, SMALL)

        def step(self) -> Any:
            outcome = super().step()
            clock.tick()
            return outcome

    clock = Clock(steps)
    config = {
        "seed": 0,
        "steps": steps,
        "max_grad_norm": 1.0,
        "log": False,
        "log_interval": 10**9,
        "evaluate_interval": 10**9,
        "workspace_root": tempfile.mkdtemp(dir=root),  # a run begins in its own directory
        "checkpoint": {"load_only": True},
        "dataloader": feed.settings if feed.from_dataset else {},
    }
    with Timed(config) as runner:
        runner.train()
    return clock.microseconds


def ignite(feed: Feed, steps: int, root: str) -> float:
    """Train with PyTorch-Ignite."""
    from ignite.engine import Engine, Events

    model, criterion, clock = make_model(SMALL), make_criterion(SMALL), Clock(steps)
    optimizer, scheduler = make_optimizer(model, SMALL)

    def update(engine: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.item())

    trainer = Engine(update)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, clock.tick)
    length = len(feed.batches)
    trainer.run(feed.loader(), max_epochs=-(-steps // length), epoch_length=length)
    return clock.microseconds


def accelerate(feed: Feed, steps: int, root: str) -> float:
    """Train with Accelerate."""
    return timed(updates_with_accelerate(make_model(SMALL), feed.loader(), SMALL), steps)


def transformers(feed: Feed, steps: int, root: str) -> float:
    """Train with the Trainer of Transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = make_model(SMALL), make_criterion(SMALL)

        def forward(self, input: Any, labels: Any) -> dict[str, Any]:
            return {"loss": self.criterion(self.model(input), labels)}

    class FromList(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if feed.from_dataset:
                return super().get_train_dataloader()
            return [{"input": input, "labels": target} for input, target in feed.batches]

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {
            "input": torch.stack([input for input, _ in samples]),
            "labels": torch.stack([target for _, target in samples]),
        }

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    clock, model = Clock(steps), WithLoss()
    arguments = TrainingArguments(
        output_dir=root,
        max_steps=steps,
        max_grad_norm=1.0,
        per_device_train_batch_size=SMALL.batch_size,
        dataloader_drop_last=True,
        dataloader_num_workers=feed.num_workers,
        dataloader_persistent_workers=feed.num_workers > 0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = (
        {"train_dataset": Samples(feed.batches), "data_collator": collate}
        if feed.from_dataset
        else {}
    )
    FromList(
        model, arguments, callbacks=[Ticks()], optimizers=make_optimizer(model, SMALL), **data
    ).train()
    return clock.microseconds


def lightning(feed: Feed, steps: int, root: str) -> float:
    """Train with Lightning."""
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = make_model(SMALL), make_criterion(SMALL)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.criterion(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = make_optimizer(self.model, SMALL)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    class Ticks(pytorch_lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    clock = Clock(steps)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks()],
        default_root_dir=root,
    )
    # A bare list would be taken for several loaders.
    trainer.fit(Module(), feed.loader() if feed.from_dataset else Passes(feed.batches))
    return clock.microseconds


WAYS: dict[str, tuple[Way, str]] = {
    "by hand": (by_hand, "torch"),
    "danling": (danling, "danling"),
    "Ignite": (ignite, "ignite.engine"),
    "Accelerate": (accelerate, "accelerate"),
    "HF Trainer": (transformers, "transformers"),
    "Lightning": (lightning, "pytorch_lightning"),
}

STATEMENTS = {
    "danling": "from danling import Runner",
    "Ignite": "from ignite.engine import Engine",
    "Accelerate": "from accelerate import Accelerator",
    "HF Trainer": "from transformers import Trainer",
    "Lightning": "from pytorch_lightning import Trainer",
}


def installed() -> list[str]:
    """Return the ways that can be gone here."""
    return [
        name
        for name, (_, module) in WAYS.items()
        if find_spec(module.partition(".")[0]) is not None
    ]


def step_costs(names: list[str], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return microseconds an update by feed, way and round; the first round warms up."""
    batches = make_batches(SMALL)
    feeds = {title: Feed(batches, **settings) for title, settings in FEEDS.items()}
    times: dict[str, dict[str, list[float]]] = {
        title: {name: [] for name in names} for title in feeds
    }
    with tempfile.TemporaryDirectory() as root:
        for round_ in range(rounds + 1):
            for title, feed in feeds.items():
                for name in names:
                    microseconds = WAYS[name][0](feed, steps, root)
                    if round_:
                        times[title][name].append(microseconds)
    return times


def in_process(code: str) -> float:
    """Return what a fresh process prints last."""
    path = str(Path(__file__).parent)
    ready = f"import sys; sys.path.insert(0, {path!r}); import torch; torch.set_num_threads(1); "
    # Modules are imported as they were compiled before, whatever the environment says.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [sys.executable, "-c", ready + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def import_time(name: str) -> float:
    """Return seconds of the import beyond torch's own: the median of five, after one that compiles."""
    code = (
        f"import time; t = time.perf_counter(); {STATEMENTS[name]}; print(time.perf_counter() - t)"
    )
    return statistics.median([in_process(code) for _ in range(6)][1:])


def peak_memory(name: str) -> float:
    """Return the peak of a process in MB."""
    function = WAYS[name][0].__name__
    train = (
        f"peers.{function}(peers.Feed(peers.make_batches(peers.SMALL)), 300, tempfile.mkdtemp())"
    )
    quiet = "import logging, warnings; warnings.simplefilter('ignore'); logging.disable(50); "
    # Of the kernel's two figures the one that begins anew with the program, not with its parent.
    peak = "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024)"
    return in_process(f"{quiet}import peers, tempfile; {train}; {peak}")


def as_table(figures: dict[str, dict[str, dict[str, float]]], shown: str = "dataset") -> str:
    """Return the figures as a table of Markdown: an update over a user's `Dataset`, and the ratios of all three."""
    lines = [
        "| | time of an update | times the loop by hand | ... 2 workers | ... from a list | import beyond torch | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures[shown].items():
        ratios = " | ".join(
            f"{figures[title][name]['ratio']:.2f}" for title in (shown, "2 workers", "list")
        )
        imported = f"{row['import_s']:.2f} s" if row["import_s"] else ""
        title = "loop by hand" if name == "by hand" else name
        lines.append(
            f"| {title} | {row['median_us']:,.0f} us | {ratios} | {imported} | {row['peak_mb']:.0f} MB |"
        )
    return "\n".join(lines)


def write_table(page: Path, table: str) -> None:
    """Put the table into the place of the one whose first column is the time of an update.

    Raises:
        ValueError: If there is none.
    """
    lines = page.read_text().splitlines()
    first = next(
        (number for number, line in enumerate(lines) if line.startswith("| | time of an update |")),
        None,
    )
    if first is None:
        raise ValueError(
            f"Expected a table that begins with '| | time of an update |' in {page}. Received: none."
        )
    last = next(
        number
        for number in range(first, len(lines) + 1)
        if number == len(lines) or not lines[number].startswith("|")
    )
    page.write_text("\n".join([*lines[:first], *table.splitlines(), *lines[last:]]) + "\n")


def write_sentences(
    page: Path, rounds: int, figures: dict[str, dict[str, dict[str, float]]], *, cpu_time: bool
) -> None:
    """Put the ratios into the sentences of a page that state them, and the number of rounds into the commands.

    Raises:
        ValueError: If the page has no such sentence.
    """
    ratios = {
        name: [f"{figures[title][name]['ratio']:.2f}" for title in ("dataset", "2 workers", "list")]
        for name in figures["dataset"]
    }
    own = ratios["danling"]
    others = sorted(row[0] for name, row in ratios.items() if name not in ("by hand", "danling"))
    if cpu_time:
        sentences = {
            r"\d\.\d+ times its time of the processor": f"{own[0]} times its time of the processor"
        }
        for name, of_name in (("danling takes", own), ("Ignite", ratios.get("Ignite", []))):
            if of_name:
                listed = f"{', '.join(of_name[:2])} and {of_name[2]}"
                sentences[
                    rf"(?<=By time of the processor)(.*{name}) \d\.\d+, \d\.\d+ and \d\.\d+"
                ] = rf"\1 {listed}"
    else:
        sentences = {
            r"\*\*x \d\.\d+\*\*(?= \| time of an update)": f"**x {own[0]}**",
            r"an update takes \d\.\d+ times": f"an update takes {own[0]} times",
            r"peers\.py --rounds \d+": f"peers.py --rounds {rounds}",
        }
        if others:
            sentences[r"other libraries: \d\.\d+ to \d\.\d+"] = (
                f"other libraries: {others[0]} to {others[-1]}"
            )
    text, written = page.read_text(), 0
    for pattern, sentence in sentences.items():
        text, number = re.subn(pattern, sentence, text)
        written += number
    if not written:
        raise ValueError(
            f"Expected a sentence with a ratio of an update in {page}. Received: none."
        )
    page.write_text(text)


def plot(figures: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw the step costs as bars, three for each library."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(figures["dataset"])[::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 * len(names) + 1))
    for number, (title, rows) in enumerate(figures.items()):
        places = [place + (1 - number) * 0.27 for place in range(len(names))]
        axes.barh(places, [rows[name]["ratio"] for name in names], height=0.25, label=title)
    axes.set_yticks(range(len(names)), names)
    axes.legend()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time of an update, in times of the loop by hand")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print a table, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=1100, help="updates of a block")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="put the figures into the table of that page")
    parser.add_argument(
        "--readme", type=Path, help="put the ratios into the sentences of that page"
    )
    parser.add_argument("--plot", type=Path, help="draw them there (needs matplotlib)")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(WAYS),
        help="measure these only, together with the loop by hand and this library",
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="count time of the processor: for a busy machine"
    )
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(
            f"Expected --steps to be more than {WARM_UP}, the updates of a block that are not counted. Received: {asked.steps}."
        )
    Clock.of_processor = asked.cpu_time
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    names = installed()
    missing = [name for name in WAYS if name not in names]
    if missing:
        print(f"Not installed, left out: {', '.join(missing)}.")
    if asked.peers is not None:
        names = [name for name in names if name in ("by hand", "danling", *asked.peers)]
    figures = {
        title: pairs.summarize(times, "by hand")
        for title, times in step_costs(names, asked.rounds, asked.steps).items()
    }
    for title, rows in figures.items():
        print(f"{title:12} {'us an update':>22} {'x by hand':>10}")
        for name, row in rows.items():
            spread = f"{row['median_us']:.0f} ({row['low_us']:.0f}-{row['high_us']:.0f})"
            print(f"{name:12} {spread:>22} {row['ratio']:>10.3f}", flush=True)
    for name, row in figures["dataset"].items():
        row["import_s"] = import_time(name) if name in STATEMENTS else 0.0
        row["peak_mb"] = peak_memory(name)
    table = as_table(figures)
    print(table)
    if asked.page and not asked.cpu_time:
        write_table(asked.page, table)
    for page in filter(None, (asked.page, asked.readme)):
        write_sentences(page, asked.rounds, figures, cpu_time=asked.cpu_time)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    if asked.plot:
        plot(figures, asked.plot)


if __name__ == "__main__":
    main()
