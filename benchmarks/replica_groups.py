"""What TorchFT costs an update: a small model without it, in one replica group, and in two on this machine.

python benchmarks/replica_groups.py                       # milliseconds an update; needs `pip install torchft-nightly`
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

UPDATES = 300
WARM_UP = 50


class Timed(dl.Runner):
    """Notes when its updates are over."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        self.criterion = nn.MSELoss()
        self.datasets = {"train": TensorDataset(torch.randn(4096, 256), torch.randn(4096, 256))}
        self.times: list[float] = []

    def step(self) -> dl.training.UpdateOutcome:
        """Note when it is over."""
        outcome = super().step()
        self.times.append(time.perf_counter())
        return outcome


def train(groups: int, replica_id: int, root: str) -> float:
    """Return the tenth percentile of the updates after the first ones, in milliseconds: what else runs here does not count."""
    optim = {"type": "sgd", "lr": 0.01}
    config = dl.RunnerConfig(seed=1, steps=UPDATES, workspace_root=root, log=False, optim=optim)
    config.dataloader.batch_size = 32
    config.checkpoint.interval = UPDATES
    if groups:
        config.ft.enabled, config.ft.group_size, config.ft.replica_id = True, groups, replica_id
        config.ft.min_replica_size = groups
    with Timed(config) as runner:
        runner.train()
        spans = [after - before for before, after in pairwise(runner.times[WARM_UP:])]
        return statistics.quantiles(spans, n=10)[0] * 1e3


def in_groups(groups: int) -> float:
    """Return milliseconds an update of the first of several groups, each a process."""
    with tempfile.TemporaryDirectory() as root:
        commands = [
            [sys.executable, __file__, str(groups), str(group), root] for group in range(groups)
        ]
        jobs = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for command in commands
        ]
        first, *_ = [float(job.communicate()[0].split()[-1]) for job in jobs]
        return first


def main() -> None:
    """Start a lighthouse and compare."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=300, quorum_tick_ms=50
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    with tempfile.TemporaryDirectory() as root:
        plain = train(0, 0, root)
    print(
        f"without TorchFT {plain:.2f} ms, one group {in_groups(1):.2f} ms, two groups {in_groups(2):.2f} ms an update"
    )
    server.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
    else:
        os.environ.setdefault("RUST_LOG", "error")
        main()
