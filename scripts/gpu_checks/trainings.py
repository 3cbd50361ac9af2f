"""Small trainings, and what all checks share: the device, settings, digests of a state, and times."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import danling as dl

ON_CPU = os.environ.get("GPU_CHECK_CPU") == "1"
"""Whether tiny sizes run on the CPU. The device is never asked: a process that has asked CUDA cannot fork one that uses it."""
SCRATCH = Path(os.environ.get("GPU_CHECK_SCRATCH") or tempfile.gettempdir())
DEVICE = torch.device("cpu" if ON_CPU else "cuda")

Found = dict[str, Any]
"""What a check has found; `passed` says whether that is as expected, where there is an expectation."""

_TOKENS = 97
_KEPT_LOSSES = 64


# Trainings


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Tokens that follow from the index, which a model can learn."""

    def __init__(self, count: int, length: int, first: int = 0) -> None:
        self.count, self.length, self.first = count, length, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = index + self.first
        tokens = (torch.arange(self.length + 1) * (2 * place + 1) + place * place) % _TOKENS
        return tokens[:-1], tokens[1:]


class Watched(dl.Runner):
    """Keeps its first losses, and ends by a signal after the updates that are named."""

    kill_at = stop_at = -1

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        self.losses: list[Tensor] = []

    def train_step(self, data: Any) -> Any:
        step = self.state.train.global_step
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.stop_at:
            type(self).stop_at = -1
            os.kill(os.getpid(), signal.SIGTERM)
        returned = super().train_step(data)
        if len(self.losses) < _KEPT_LOSSES:
            # CUDA graphs write over it.
            self.losses.append(returned[1].detach().clone())
        return returned


class SmallGPT(Watched):
    """A transformer of two blocks with dropout, a metric and a split to evaluate."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = GPT(_TOKENS, context=64, width=64, depth=2, heads=4, dropout=0.1)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Sequences(2000, 32), "val": Sequences(64, 32, first=5000)}
        self.metrics = {
            "acc": lambda pred, target: dl.metrics.accuracy(pred.flatten(0, -2), target.flatten())
        }

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.flatten(0, 1), target.flatten())


def build_mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with GELU between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class MLP(Watched):
    """Linear layers on random points; batches in a list by default, so that nothing but the update counts."""

    widths: tuple[int, ...] = (64, 96, 36, 10)
    batch, samples = 32, 3200
    regression = False
    repeat = 1
    """How often the list has its batches, so that no pass ends within a block that is timed."""
    of_list = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(0)
        self.model = build_mlp(self.widths)
        self.criterion = nn.MSELoss() if self.regression else nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}
        inputs = torch.randn(self.samples, self.widths[0], generator=generator)
        values = torch.randn(self.samples, self.widths[-1], generator=generator)
        targets = values if self.regression else values.argmax(1)
        if self.of_list:
            starts = range(0, self.samples, self.batch)
            batches = [
                (inputs[first : first + self.batch], targets[first : first + self.batch])
                for first in starts
            ]
            self.dataloaders = {"train": batches * self.repeat}
        else:
            self.datasets = {"train": TensorDataset(inputs, targets)}


def settings(name: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a small training in its own directory; those in sections are added."""
    base: dict[str, Any] = {
        "seed": 1,
        "dir": str(SCRATCH / name),
        "log": False,
        "git_diff": False,
        "optim": {"type": "adamw", "lr": 1e-3},
        "dataloader": {"batch_size": 16},
        "checkpoint": {"load_only": True},
        "evaluate_interval": 10**9,
        "log_interval": 10**6,
        "evaluate_splits": [],
        "try_evaluation": False,
    }
    for key, value in more.items():
        known = base.get(key)
        base[key] = (
            {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        )
    return base


def fingerprint(runner: dl.TorchRunner) -> str:
    """Return a digest of weights, optimizer and averages, bit for bit. Call on all ranks."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            plain = whole.detach().cpu().contiguous()
            # Without NumPy, which torch does not need.
            digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                take(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                take(each)

    take(runner.unwrapped_model.state_dict())
    take(runner.optimizer.state_dict()["state"])
    if runner.ema is not None:
        take(dict(runner.ema.weights))
    return digest.hexdigest()[:16]


# Times and memory


def synchronize() -> None:
    """Wait for the device."""
    if not ON_CPU:
        torch.cuda.synchronize()


def peak_gib() -> float | None:
    """Return the most memory of the device that this process has had; `None` on the CPU."""
    return None if ON_CPU else round(torch.cuda.max_memory_allocated() / 2**30, 3)


def timed(block: Callable[[], object]) -> float:
    """Return the seconds of a block, until the device has done it."""
    synchronize()
    begin = time.perf_counter()
    block()
    synchronize()
    return time.perf_counter() - begin


def interleaved(
    blocks: Mapping[str, Callable[[], object]], rounds: int, number: int, base: str
) -> dict[str, Found]:
    """Return for each way the median seconds of an update, and the quartiles of its ratio to the base in the same round.

    Args:
        blocks: What makes one block of updates, by the name of the way.
        rounds: How often each is timed, after one round that warms up.
        number: Updates of a block.
        base: The way that the others are compared with.
    """
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for round_ in range(rounds + 1):
        for name, block in blocks.items():
            taken = timed(block) / number
            if round_:
                seconds[name].append(taken)
    found = {}
    for name, values in seconds.items():
        ratios = sorted(value / other for value, other in zip(values, seconds[base]))
        quartiles = [
            round(ratios[int(share * (len(ratios) - 1))], 4) for share in (0.25, 0.5, 0.75)
        ]
        found[name] = {
            "us_per_update": round(statistics.median(values) * 1e6, 1),
            "times_base": quartiles,
        }
    return found
