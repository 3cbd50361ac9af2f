"""The training that `danling doctor` starts on two processes, kills, and resumes. Not meant to be called by hand.

python -m danling.cli.doctor_job DIRECTORY [--backend BACKEND] [--halt-at STEP]

Writes `digest`, a SHA-256 over everything that a checkpoint would hold, into the directory when it has finished.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.config.names import BACKENDS

from .doctor import DIGEST, HALTED

STEPS = 16


class DoctorRunner(dl.TorchRunner):
    """A network with dropout, whose every random draw, moment and position must survive the kill."""

    def __init__(self, config: dl.RunnerConfig, halt_at: int | None) -> None:
        super().__init__(config)
        self.halt_at = halt_at
        points = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
        self.datasets = {"train": TensorDataset(points, points[:, :3].argmax(1))}
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.criterion = nn.CrossEntropyLoss()

    def step(self) -> Any:
        """Update as usual; from step `halt_at` on, wait to be killed."""
        if self.halt_at is not None and self.state.train.global_step == self.halt_at:
            # Finish background writes, so that the checkpoints on disk do not depend on the moment of the kill.
            self.checkpoint_manager.wait()
            Path(self.workspace.dir, f"{HALTED}-{self.rank}").touch()
            # End if the process that started this one has ended, since nothing else would.
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(1)
            raise SystemExit("the doctor is gone")
        return super().step()


def digest(value: object) -> str:
    """Return a SHA-256 over nested plain values and tensors, equal when all of them are bitwise the same."""
    total = hashlib.sha256()

    def add(item: object, path: str) -> None:
        total.update(path.encode())
        if isinstance(item, torch.Tensor):
            raw = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total.update(f"{item.dtype}{tuple(item.shape)}".encode() + bytes(raw.tolist()))
        elif isinstance(item, Mapping):
            for key in sorted(item, key=str):
                add(item[key], f"{path}/{key}")
        elif isinstance(item, (list, tuple)):
            for index, part in enumerate(item):
                add(part, f"{path}/{index}")
        else:
            total.update(repr(item).encode())

    add(value, "")
    return total.hexdigest()


def settings(directory: Path, backend: str) -> dl.RunnerConfig:
    """Return the configuration: a checkpoint every third step, all of a run in one directory."""
    return dl.RunnerConfig(
        {
            "steps": STEPS,
            "seed": 5,
            "dir": str(directory),
            "auto_resume": True,
            "log": False,
            "backend": "gloo",
            "dataloader": {"batch_size": 4},
            "optim": {"type": "adamw", "lr": 0.01},
            "scheduler": {"type": "cosine", "warmup_steps": 2},
            "checkpoint": {"interval": 3, "backend": backend},
        }
    )


def main() -> None:
    """Train, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--halt-at", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with DoctorRunner(settings(options.directory, options.backend), options.halt_at) as runner:
        resumed_at = runner.state.train.global_step
        runner.train()
        payload = runner.state_dict()
        payload.pop("runner")
        payload["state"].pop("elastic")
        if runner.is_main_process:
            (options.directory / DIGEST).write_text(f"{digest(payload)} {resumed_at}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
