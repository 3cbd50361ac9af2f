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
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
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
        self.optimizer = {name: torch.optim.Adam(self.model.get_submodule(name).parameters()) for name in parts}

    def train_step(self, data: Any) -> Any:
        gan: Any = self.model
        with self.optimizing("discriminator"):
            with self.forward_context():
                fake = gan.generator(torch.randn(len(data[0]), gan.noise, device=data[0].device))
                loss = softplus(-gan.discriminator(data[0])).mean() + softplus(gan.discriminator(fake.detach())).mean()
            self.backward(loss)
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


def _waits(root: Path) -> dict[str, tuple[int, dict[str, int]]]:
    """Return by case how many updates were looked at, and the waits in them by line."""
    device.use()
    found = {}
    for number, (name, (kind, more)) in enumerate(_CASES.items()):
        settings = {"dir": str(root / str(number)), "seed": 1, "log_interval": 1000, "steps": 8, "checkpoint": {"interval": 100}}
        settings |= {"dataloader": {"batch_size": 4}, "optim": {"type": "adamw", "lr": 0.01}}
        try:
            with kind({**settings, **more}) as runner, device.watched() as watch:
                runner.watch = watch
                runner.train()
            found[name] = (6, dict(Counter(map(str, watch.between(2, 8)))))
        except Exception as error:
            import traceback
            traceback.print_exc()
            found[name] = (6, {repr(error)[:400]: 6})
    return found
