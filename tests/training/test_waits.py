"""An update does not make the host wait for the device, but where it may be skipped: once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gan import GAN
from support import device
from support.device import run_processes
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import danling as dl

pytestmark = device.needed


def _draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Classes(dl.Runner):
    """Classifies points; counts the waits of its updates."""

    not_saved = ("watch",)
    watch: Any = None
    ignores = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        points = _draws(48, 6)
        targets = points[:, :4].argmax(1)
        if self.ignores:
            targets[::5] = -100
        self.datasets = {"train": TensorDataset(points, targets)}
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}

    def step(self) -> Any:
        outcome = super().step()
        self.watch.mark()
        return outcome


class Ignoring(Classes):
    ignores = True


class Summed(Classes):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.criterion = nn.CrossEntropyLoss(reduction="sum")


class Values(Classes):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        points = _draws(48, 6)
        self.datasets = {"train": TensorDataset(points, points[:, :4])}
        self.criterion = nn.MSELoss()
        self.metrics = None


class Logging(Values):
    def train_step(self, data: Any) -> Any:
        pred, loss = super().train_step(data)
        self.log_metric("spread", pred.detach().std())
        return pred, loss


class Pictures(Classes):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets = {"train": TensorDataset(_draws(48, 64))}
        self.model = GAN(noise=4, width=16)
        self.criterion = None
        self.metrics = None
        parts = ("discriminator", "generator")
        self.optimizer = {
            name: torch.optim.Adam(self.model.get_submodule(name).parameters()) for name in parts
        }

    def train_step(self, data: Any) -> Any:
        gan: Any = self.model
        with self.optimizing("discriminator"):
            with self.forward_context():
                fake = gan.generator(torch.randn(len(data[0]), gan.noise, device=data[0].device))
                loss = (
                    softplus(-gan.discriminator(data[0])).mean()
                    + softplus(gan.discriminator(fake.detach())).mean()
                )
            self.backward(loss)
        self.watch.look_from_here()
        with self.optimizing("generator"):
            with self.forward_context():
                loss = softplus(-gan.discriminator(fake)).mean()
            self.backward(loss)
        return fake, None


_CASES: dict[str, tuple[type[Classes], dict[str, Any]]] = {
    "cross-entropy": (Classes, {}),
    "ignored targets": (Ignoring, {}),
    "summed loss": (Summed, {}),
    "MSE": (Values, {}),
    "clipping": (Classes, {"max_grad_norm": 0.1, "max_grad_value": 0.1}),
    "EMA": (Classes, {"ema": {"enabled": True, "buffers": "average", "warmup": True}}),
    "schedule": (Classes, {"scheduler": {"type": "cosine", "warmup_steps": 2}}),
    "train metrics": (Classes, {"train_metrics": True}),
    "log_metric": (Logging, {}),
    "accumulation": (Ignoring, {"accum_steps": 2}),
    "bf16": (Classes, {"precision": "bf16"}),
    "sgd": (Values, {"optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}),
    "digests": (Classes, {"audit": {"digest_interval": 2}}),
    "two optimizers": (Pictures, {}),
    "may skip": (Ignoring, {"skip_nonfinite_grad": True, "max_grad_norm": 1.0}),
    "may skip, two optimizers": (Pictures, {"skip_nonfinite_grad": True}),
    "fp16": (Classes, {"precision": "fp16", "max_grad_norm": 1.0}),
}


_ON_TWO = ["cross-entropy", "MSE", "accumulation", "two optimizers", "digests", "may skip"]


_SHARDED = [
    "cross-entropy",
    "MSE",
    "clipping",
    "EMA",
    "accumulation",
    "bf16",
    "digests",
    "may skip",
]


def _waits(root: Path, names: list[str], layout: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return by case the waits in six updates, by line."""
    device.use()
    found = {}
    for number, name in enumerate(names):
        kind, more = _CASES[name]
        settings = {
            "dir": str(root / str(number)),
            "seed": 1,
            "log_interval": 1000,
            "steps": 8,
            "log": False,
        }
        settings |= {"checkpoint": {"interval": 100}, "dataloader": {"batch_size": 4}}
        settings |= {"optim": {"type": "adamw", "lr": 0.01}, "try_evaluation": False}
        with kind({**settings, **layout, **more}) as runner, device.watched() as watch:
            runner.watch = watch
            runner.train()
        found[name] = dict(Counter(map(str, watch.between(2, 8))))
    return found


_WAITING = {"may skip": 1, "fp16": 1, "may skip, two optimizers": 2}
"""Waits of an update: one for each optimizer whose step may be left out."""


_LAYOUTS = {
    "one": (list(_CASES), {}),
    "copies": (_ON_TWO, {}),
    "shards": (_SHARDED, {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
}


@pytest.mark.parametrize(
    "layout", ["one", pytest.param("copies", marks=pytest.mark.slow), "shards"]
)
def test_update_does_not_wait_for_the_device(tmp_path: Path, layout: str) -> None:
    names, settings = _LAYOUTS[layout]
    world_size = 1 if layout == "one" else 2
    for found in run_processes(
        _waits, tmp_path, names, settings, world_size=world_size, timeout=120.0
    ):
        for name, waits in found.items():
            assert sum(waits.values()) == 6 * _WAITING.get(name, 0), (name, waits)
            assert len(waits) <= 1, (name, waits)
