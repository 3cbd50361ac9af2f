"""A training script that the tests of signals run under torchrun: it says where it is, and every rank leaves its exit code.

Ranks evaluate different numbers of batches. `SLOW` names what takes long (`train`, `evaluate`, or nothing), `RAISE` a rank that
raises in its third update. `SLOW=native` waits for ever in the third one, in native code.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

import danling as dl

RANK = os.environ.get("RANK", "0")
SLOW = os.environ.get("SLOW", "")
RAISE = os.environ.get("RAISE", "")


def points(length: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Job(dl.Runner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": points(64, 1)}
        # Three batches on the first rank, nine on the second.
        self.dataloaders = {
            "val": DataLoader(points(6 + 12 * self.rank, 2 + self.rank), batch_size=2)
        }

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        if RAISE == RANK and self.state.train.global_step == 2:
            raise ArithmeticError("this rank is broken")
        self._linger("train")
        return super().train_step(data)

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        self._linger("evaluate")
        return super().evaluate_step(data)

    def _linger(self, what: str) -> None:
        if not (file := Path(f"{what}-{RANK}.pid")).exists():
            # Whole at once: who waits for the file reads it as soon as it is there.
            partial = file.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            partial.replace(file)
        if what == SLOW and self.state.train.global_step >= 5:
            time.sleep(0.2)
        if SLOW == "native" and self.state.train.global_step == 2:
            Path("stuck").touch()
            # A wait in native code, as that for a collective: Python runs no handler until it is over.
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).wait(
                ["never"], timedelta(seconds=600)
            )


def main() -> None:
    config = dl.RunnerConfig(
        {"seed": 3, "optim": {"type": "adamw", "lr": 0.01}, "tensorboard": True, "dir": "run"}
    )
    config.update({"dataloader": {"batch_size": 4}, "log_interval": 1, "auto_resume": True})
    config.parse()
    with Job(config) as runner:
        runner.train()
        weights = [p.detach().clone() for p in runner.unwrapped_model.parameters()]
        kept = {
            "weights": weights,
            "results": runner.results,
            "step": runner.state.train.global_step,
        }
        torch.save(kept, f"end-{RANK}.pt")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        Path(f"exit-{RANK}").write_text(str(end.code))
        sys.exit(end.code)
