"""Ways of doing the same that take turns, so that a change of the machine's speed hits all of them."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from workload import WORKLOADS, Workload

Clock = Callable[[], float]
Times = dict[str, list[float]]
"""Microseconds by way and round."""
Figures = dict[str, dict[str, float]]
"""Median, quartiles and ratio by way."""


class Measure(Protocol):
    """Measures the ways of one benchmark with one size of model and one kind of data."""

    def __call__(
        self, workload: Workload, rounds: int, root: str, clock: Clock, *, from_dataset: bool
    ) -> Times:
        """Return the times, with a directory for what the ways write, over a dataset or over batches in a list."""


def interleaved(
    ways: Mapping[str, Callable[[], object]], units: int, rounds: int, clock: Clock
) -> Times:
    """Return microseconds of a unit; one round before those that count warms up.

    Args:
        ways: Functions that do so many units each time they are called.
        units: Updates or batches of one call.
        rounds: How often each way has its turn.
        clock: Returns seconds.
    """
    times: Times = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, make in ways.items():
            begin = clock()
            make()
            if round_:
                times[name].append((clock() - begin) / units * 1e6)
    return times


def summarize(times: Times, against: str) -> Figures:
    """Return median and quartiles in microseconds by way, and the median of the ratios to one way in the same round.

    Args:
        times: As `interleaved` returns them; with a single round the quartiles are its time.
        against: The way that the others are divided by.
    """
    figures = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(value / base for value, base in zip(values, times[against]))
        figures[name] = {"median_us": median, "low_us": low, "high_us": high, "ratio": ratio}
    return figures


def add_options(parser: argparse.ArgumentParser, rounds: int = 20) -> None:
    """Add the options that every benchmark of pairs has."""
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count time of the processor: for a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")


def prepared(asked: argparse.Namespace) -> Clock:
    """Return the clock that the options ask for, with one thread and without log lines from here on."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    return time.process_time if asked.cpu_time else time.perf_counter


def show(title: str, figures: Figures, against: str, unit: str) -> None:
    """Print one comparison."""
    print(title)
    for name, row in figures.items():
        spread = f"({row['low_us']:,.0f}-{row['high_us']:,.0f})"
        print(
            f"  {name:22} {row['median_us']:9,.1f} us {unit} {spread:16} x {row['ratio']:.3f} of {against}",
            flush=True,
        )


def main(
    description: str,
    measure: Measure,
    *,
    against: str,
    unit: str = "an update",
    breakdown: Callable[[int, Clock], object] | None = None,
) -> None:
    """Measure over both sizes of model and both kinds of data, print, and write what was asked for.

    Args:
        description: What the benchmark measures; the first line is that of `--help`.
        measure: Measures one of them.
        against: The way that the others are divided by.
        unit: What is timed.
        breakdown: Prints what a unit consists of in so many rounds, instead, where that is asked for.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_options(parser)
    parser.add_argument(
        "--only", default="", help="measure where the title has this in it, such as 10k or Dataset"
    )
    if breakdown is not None:
        parser.add_argument(
            "--breakdown",
            action="store_true",
            help=f"print the microseconds of {unit} by part instead",
        )
    asked = parser.parse_args()
    clock = prepared(asked)
    if breakdown is not None and asked.breakdown:
        breakdown(asked.rounds, clock)
        return
    figures = {}
    for source in ("batches in a list", "a Dataset"):
        for size, workload in WORKLOADS.items():
            if asked.only not in (title := f"{size}, {source}"):
                continue
            with tempfile.TemporaryDirectory() as root:
                times = measure(
                    workload, asked.rounds, root, clock, from_dataset=source == "a Dataset"
                )
            figures[title] = summarize(times, against)
            show(title, figures[title], against, unit)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
