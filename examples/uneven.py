"""Uneven data over ranks: every rank has its own shard, and one has three times as much as another.

torchrun --nproc-per-node 2 examples/uneven.py            # 13 s of processor time
python examples/uneven.py                                 # one process with all shards: the same evaluation

Training ends a pass for all ranks when the first one has no batch left, and says so: no rank waits for another for ever. Each
update is still the mean over the samples that the ranks had, also where their batches differ in size. Evaluation has no such end:
every sample of every shard counts once. Two processes take 3,020 samples in 95 updates and end at 0.891 validation accuracy; one
process takes all 6,000 in 375 updates and ends at 0.911. Where shards can be moved, put them into one dataset: the library then
divides every epoch evenly, and nothing is left out.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import danling as dl


class ShardRunner(dl.Runner):
    """Reads shard `rank` on rank `rank`, and all of them on a single process."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        if self.world_size not in (1, 2):
            raise ValueError(
                f"Expected one process or two, since there are two shards. Received: {self.world_size}."
            )
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        images = images.float() / 16
        ends = (0, 900, 1200, 1297, 1797)  # two shards to train on, two to validate on
        shards = [
            TensorDataset(images[begin:end], labels[begin:end]) for begin, end in pairwise(ends)
        ]
        self.dataloaders = {
            "train": DataLoader(self.own(shards[:2]), batch_size=16, shuffle=True),
            "val": DataLoader(self.own(shards[2:]), batch_size=50),
        }
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}

    def own(self, shards: list[TensorDataset]) -> Dataset[tuple[torch.Tensor, ...]]:
        """Return the shard of this rank, or all of them."""
        return shards[self.rank] if self.distributed else ConcatDataset(shards)


if __name__ == "__main__":
    config = dl.RunnerConfig(seed=1, lineage="uneven", epochs=5, score_name="acc")
    config.optim = {"type": "adamw", "lr": 3e-3}
    config.parse()
    with ShardRunner(config) as runner:
        runner.train()
        updates, samples = runner.train_state.global_step, runner.train_state.samples
        runner.print(
            f"{samples} samples in {updates} updates; validation accuracy {runner.latest_score:.3f}"
        )
