"""How long it takes from a checkpoint to the first batch, early and late in an epoch; nothing consumed is read again.

OMP_NUM_THREADS=1 python benchmarks/resume_time.py --samples 1000000
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are counted when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Positioned(dl.TorchRunner):
    """A small model over many samples."""

    def __init__(self, config: dict[str, Any], samples: int) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.counting = Counting(samples)
        self.datasets = {"train": self.counting}


def resume(config: dict[str, Any], samples: int, share: float) -> tuple[float, int]:
    """Save at `share` of an epoch, resume in a new runner; return the seconds to the first batch and the samples read."""
    with Positioned(config, samples) as runner:
        runner.sources["train"].loader.order.consumed = int(samples * share) // 32 * 32
        runner.save_checkpoint()
        runner.checkpoint_manager.wait()
    begin = time.perf_counter()
    with Positioned({**config, "auto_resume": True}, samples) as runner:
        next(runner.sources["train"].batches())
        return time.perf_counter() - begin, runner.counting.reads


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    logging.getLogger("danling").setLevel(logging.ERROR)
    seconds: dict[float, list[float]] = {0.01: [], 0.99: []}
    reads = set()
    for _ in range(options.rounds):
        for share, found in seconds.items():
            with tempfile.TemporaryDirectory() as root:
                config = {
                    "seed": 1,
                    "epochs": 1,
                    "workspace_root": root,
                    "log": False,
                    "dataloader": {"batch_size": 32},
                }
                taken, read = resume(
                    {**config, "optim": {"type": "adamw", "lr": 1e-3}}, options.samples, share
                )
                found.append(taken)
                reads.add(read)
    for share, found in seconds.items():
        print(
            f"at {share:.0%} of an epoch: {1e3 * statistics.median(found):.0f} ms ({1e3 * min(found):.0f}-{1e3 * max(found):.0f})"
        )
    print(f"samples read for the first batch: {sorted(reads)}")
    if options.json:
        medians = {str(share): statistics.median(found) for share, found in seconds.items()}
        options.json.write_text(
            json.dumps({"seconds_by_share_of_an_epoch": medians, "samples_read": sorted(reads)})
        )


if __name__ == "__main__":
    main()
