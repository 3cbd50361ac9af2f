"""The program that `danling doctor` starts on one process or two, stops, kills and resumes. Not meant to be called by hand.

torchrun --nproc-per-node 2 -m danling.cli.doctor_job BACKEND
"""

from __future__ import annotations

import os
import sys

# The processes are on this machine.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.devices import accelerator_type


class DoctorRunner(dl.TorchRunner):
    """A network with dropout, whose every random draw, moment and position must survive a kill."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        points = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
        self.datasets = {"train": TensorDataset(points, points[:, :3].argmax(1))}
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.criterion = nn.CrossEntropyLoss()


def main() -> None:
    """Train for longer than anybody waits."""
    torch.set_num_threads(1)
    settings = {
        "epochs": 100_000,
        "max_time": "1:00:00",  # where the doctor was killed, nothing else ends it
        "seed": 5,
        "log": False,
        "deterministic": accelerator_type() is not None,  # the doctor compares bitwise
        "dataloader": {"batch_size": 4},
        "optim": {"type": "adamw", "lr": 0.01},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
        "checkpoint": {"interval": 1, "backend": sys.argv[1]},
    }
    with DoctorRunner(dl.RunnerConfig(settings)) as runner:
        runner.train()


if __name__ == "__main__":
    main()
