"""What it costs that every sample's randomness is keyed by (seed, epoch, index).

    python benchmarks/keyed_randomness.py

Reads the same dataset with and without the keys, in pairs that follow one another so that a change of the machine's
speed hits both, and prints medians. The target is 15 us a sample with torch, NumPy and `random` seeded; exits with 1 if
it is missed. A run takes about 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from danling.data import BatchSource, DataLoader, KeyedDataset

SAMPLES, PAIRS, TARGET = 4096, 41, 15.0


class Nothing(Dataset[int]):
    """Costs as little as a dataset can."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def seconds(action: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def difference(one: Callable[[], Any], other: Callable[[], Any], each: int) -> float:
    """Return the median of `other - one` over interleaved pairs, in microseconds for each of so many parts."""
    one(), other()
    return statistics.median(seconds(other) - seconds(one) for _ in range(PAIRS)) / each * 1e6


def read_items() -> float:
    """Return the cost of a sample that is read by itself."""
    plain, keyed = Nothing(), KeyedDataset(Nothing(), 0)
    keys = [(0, index) for index in range(SAMPLES)]
    return difference(lambda: [plain[index] for _, index in keys], lambda: keyed.__getitems__(keys), SAMPLES)


def read_batches(batch_size: int) -> float:
    """Return the cost of a sample in a loader without workers, which puts training's streams back at every batch."""
    plain = TorchDataLoader(Nothing(), batch_size=batch_size, shuffle=True, collate_fn=len)
    keyed = DataLoader(Nothing(), batch_size=batch_size, shuffle=True, collate_fn=len)
    return difference(lambda: list(plain), lambda: list(keyed), SAMPLES)


def source_over_users_loader() -> float:
    """Return what `BatchSource` adds to a batch of a user's loader, with its commit."""
    batches = [torch.zeros(1)] * 20_000
    source = BatchSource(batches, split="train", rank=0, world_size=1, seed=0)

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
    cost = read_items()
    figures = {"seeding_us_a_sample": cost}
    print(f"seeding torch, NumPy and random     {cost:6.2f} us a sample   (target {TARGET:.0f})")
    for batch_size in (4, 16, 64):
        figures[f"loader_batches_of_{batch_size}_us_a_sample"] = each = read_batches(batch_size)
        print(f"loader of this process, batches {batch_size:3d} {each:6.2f} us a sample")
    figures["source_us_a_batch"] = over = source_over_users_loader()
    print(f"BatchSource on a user's loader      {over:6.2f} us a batch, commit included")
    if target:
        target.write_text(json.dumps(figures))
    raise SystemExit(cost > TARGET)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
