"""A small run in which every kind of state moves, and what writes a checkpoint of it in the middle: the fixtures `v*/middle-*`.

    PYTHONPATH=.:tests python -m support.stored_runs tests/checkpoints/fixtures/v2

Next to each checkpoint is `end.pt`: the weights with which the version that wrote it ended, where nothing was drawn after the resume.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import whole

from .processes import run_processes

KINDS = {"file": 1, "sharded": 2}
"""Processes by the kind of the checkpoint."""
MIDDLE, END = 6, 12


class Points(Dataset[dict[str, Any]]):
    """Points that are augmented with NumPy and `random`, or are as they are."""

    def __init__(self, augments: bool) -> None:
        self.points = torch.randn(26, 6, generator=torch.Generator().manual_seed(7))
        self.augments = augments

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = 0.1 * float(numpy.random.rand()) + 0.1 * random.random() if self.augments else 0.0
        return {"input": self.points[index] + noise, "target": self.points[index, :3].argmax()}


class Centred(nn.Module):
    """Subtracts a running mean: a buffer that is saved, and one that is not persistent."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(batch.detach().mean(0), 0.1)
            self.calls.add_(1)
        return batch - self.mean


class Counts:
    """A helper object of the user's."""

    def __init__(self) -> None:
        self.steps = 0
        self.by_class: defaultdict[int, int] = defaultdict(int)


class StoredRun(dl.Runner):
    """Four updates of eight samples a pass, of which the last has two; a parameter is frozen on the way.

    Args:
        config: Its configuration.
        draws: Whether the points are augmented and neurons are dropped.
    """

    def __init__(self, config: dict[str, Any], *, draws: bool = True) -> None:
        super().__init__(config)
        drop = nn.Dropout(0.2 if draws else 0.0)
        self.model = nn.Sequential(
            Centred(), nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), drop, nn.Linear(8, 3)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Points(draws)}
        self.seen, self.history, self.total = 0, list[float](), torch.zeros(3, dtype=torch.float64)
        self.table, self.counts = numpy.zeros(3), Counts()

    def train_step(self, data: dict[str, Any]) -> Any:
        self.seen += 1
        self.history.append(float(self.seen))
        self.total[self.seen % 3] += 1
        self.table[self.seen % 3] += 2
        self.counts.steps += 1
        self.counts.by_class[self.seen % 2] += 1
        if self.state.train.global_step == 3:
            self.unwrapped_model.get_parameter("2.bias").requires_grad_(False)
        return super().train_step((data["input"], data["target"]))


def settings(kind: str, root: Path | str, steps: int, **more: Any) -> dict[str, Any]:
    """Return the configuration of the run, up to an update."""
    config: dict[str, Any] = {
        "dir": str(root),
        "seed": 3,
        "log": False,
        "accum_steps": 2,
        "steps": steps,
    }
    config |= {
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine", "total_steps": 20},
    }
    config |= {
        "dataloader": {"batch_size": 4 // KINDS[kind]},
        "ema": {"enabled": True, "decay": 0.9},
    }
    config |= {"checkpoint": {"interval": 1000, "async_mode": "disabled"}}
    if kind == "sharded":
        config |= {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
    return {**config, **more}


def weights(runner: dl.Runner) -> dict[str, Tensor]:
    """Return the whole weights. Called on all ranks."""
    return {
        name: whole(value).detach().cpu().clone()
        for name, value in runner.model_state_dict().items()
    }


def train(kind: str, root: str, steps: int, *, draws: bool, **more: Any) -> dict[str, Tensor]:
    """Train to an update; return the weights."""
    with StoredRun(settings(kind, root, steps, **more), draws=draws) as runner:
        runner.train()
        return weights(runner)


def write(kind: str, folder: Path) -> None:
    """Write the fixture of a kind."""
    with tempfile.TemporaryDirectory() as root:
        run_processes(
            train, kind, f"{root}/middle", MIDDLE, draws=True, world_size=KINDS[kind], timeout=300
        )
        found = Path(root, "middle", "checkpoints")
        folder.mkdir(parents=True)
        for path in sorted(found.iterdir()):
            if path.name.startswith(("latest", "targets")):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
        latest = folder / ("latest.pth" if kind == "file" else "latest")
        options = {"draws": False, "resume": str(latest)}
        ends = run_processes(
            train, kind, f"{root}/end", END, world_size=KINDS[kind], timeout=300, **options
        )
        torch.save(ends[0], folder / "end.pt")


if __name__ == "__main__":
    for name in KINDS:
        write(name, Path(sys.argv[1], f"middle-{name}"))
