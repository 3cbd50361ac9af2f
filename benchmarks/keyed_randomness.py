"""What it costs that torch, NumPy and `random` are seeded before each batch, or before each sample.

    python benchmarks/keyed_randomness.py

Reads the same dataset with and without the keys, in pairs that follow one another so that a change of the machine's
speed hits both, and prints medians. The targets are 40 us a batch, and 15 us a sample with `keyed="sample"`; exits with 1 if one is
missed. A run takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from danling.data import DataLoader, Share, open_source

SAMPLES, PAIRS, TARGET, TARGET_OF_SAMPLE = 4096, 41, 40.0, 15.0


class Nothing(Dataset[int]):
    """Costs as little as a dataset can."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Nothing):
    """Draws from one stream.

    Args:
        draw: Draws a number.
    """

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> int:
        self.draw()
        return index


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "random": random.random,
    "NumPy": numpy.random.rand,
}


def seconds(action: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def difference(one: Callable[[], Any], other: Callable[[], Any], each: int) -> float:
    """Return the median of `other - one` over interleaved pairs, in microseconds for each of so many parts."""
    one(), other()
    return statistics.median(seconds(other) - seconds(one) for _ in range(PAIRS)) / each * 1e6


def read_batches(batch_size: int, dataset: Dataset[int], keyed: str = "batch") -> float:
    """Return the cost of a batch in a loader without workers."""
    plain = TorchDataLoader(dataset, batch_size=batch_size, shuffle=True)
    seeded = DataLoader(dataset, Share(), batch_size=batch_size, shuffle=True, keyed=keyed)
    return difference(lambda: list(plain), lambda: list(seeded), SAMPLES // batch_size)


def source_over_users_loader() -> float:
    """Return what `BatchSource` adds to a batch of a user's loader, with its commit."""
    batches = [torch.zeros(1)] * 20_000
    source = open_source(batches, split="train", rank=0, world_size=1, seed=0)

    def bare() -> None:
        for _ in batches:
            pass

    def seen() -> None:
        source.rewind()
        for batch in source.batches():
            source.commit((batch,))

    return difference(bare, seen, len(batches))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there")
    target = parser.parse_args().json
    figures = {}
    for batch_size in (32, 256):
        figures[f"nothing_drawn_us_a_batch_of_{batch_size}"] = each = read_batches(
            batch_size, Nothing()
        )
        print(f"nothing drawn, batches of {batch_size:3d}         {each:8.2f} us a batch")
    by_batch = []
    for name, draw in DRAWS.items():
        by_batch.append(read_batches(64, Drawing(draw)))
        figures[f"drawn_from_{name}_us_a_batch_of_64"] = by_batch[-1]
        print(
            f"only {name:6} drawn, batches of  64   {by_batch[-1]:8.2f} us a batch   (target {TARGET:.0f})"
        )
    figures["by_sample_us_a_sample"] = by_sample = (
        read_batches(64, Drawing(random.random), "sample") / 64
    )
    print(
        f"seeded before each sample             {by_sample:8.2f} us a sample  (target {TARGET_OF_SAMPLE:.0f})"
    )
    figures["source_us_a_batch"] = over = source_over_users_loader()
    print(f"BatchSource on a user's loader        {over:8.2f} us a batch, commit included")
    if target:
        target.write_text(json.dumps(figures))
    raise SystemExit(max(by_batch) > TARGET or by_sample > TARGET_OF_SAMPLE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
