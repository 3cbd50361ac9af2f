"""A small runner that takes any stack, and what tests of DeepSpeed have in common.

Importing DeepSpeed takes seconds a process, so that a test runs several cases in the same processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl

from .stacks import copied
from .toys import whole_settings, whole_state

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed"
)


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Fixed points with three positions of which some are not to be counted."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.points = torch.randn(size, 6, generator=generator)
        self.labels = torch.randint(0, 4, (size, 3), generator=generator)
        self.labels[torch.rand(size, 3, generator=generator) < 0.3] = -100

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


class AnyStackRunner(dl.Runner):
    """Classifies three positions of a point, and writes down what its updates were made of."""

    not_saved = ("trace",)

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        stop_at: int | None = None,
        poisoned: int | None = None,
        own: bool = False,
        norm: bool = True,
        frozen: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.poisoned = poisoned
        self.trace: list[tuple[float, float, float]] = []
        # No bias before the normalization: its gradient is nothing but rounding, which Adam would make steps of.
        # Seven do not divide over two ranks.
        first = nn.Linear(6, 7, bias=False)
        between = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.model = nn.Sequential(first, between, nn.Tanh(), nn.Dropout(0.1), nn.Linear(7, 12))
        first.requires_grad_(not frozen)
        if own:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.criterion = nn.CrossEntropyLoss()
        if scaled:
            self.criterion.scale = nn.Parameter(torch.ones(()))
        self.datasets = {"train": Points(38), "val": Points(9)}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().compute_loss(pred.reshape(len(pred), 4, 3), target)
        spoil = (
            self.mode == "train" and self.poisoned == self.state.train.global_step + self.state.train.skipped_updates
        )
        return loss * torch.nan if spoil and self.rank == self.world_size - 1 else loss

    def step(self) -> Any:
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        outcome = super().step()
        assert outcome.grad_norm is not None
        self.trace.append((float(outcome.loss_sum), float(outcome.weight), float(outcome.grad_norm)))
        return outcome


def settings(root: Path | str, stack: str = "deepspeed", **changes: Any) -> dict[str, Any]:
    """Return a configuration of ten updates on one process and six on two, where the last window of an epoch is a shorter one."""
    loader, schedule = {"batch_size": 4, "drop_last": False}, {"type": "cosine", "warmup_steps": 2}
    base = {"stack": stack, "epochs": 2, "max_grad_norm": 0.3, "dataloader": loader, "scheduler": schedule}
    return whole_settings(root, **{**base, "ema": {}, "log": False, **changes})


UNSAVED: dict[str, Any] = {"checkpoint.load_only": True}
"""For runs that nobody goes on with: an engine takes longer to save than to train so little."""


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    """Return the DeepSpeed section of a stage."""
    return {"zero_optimization": {"stage": stage, **changes}}


def train(config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Train and return the trace, the figures and the whole state, less what says on which attempt it was reached."""
    with AnyStackRunner(config, **options) as runner:
        runner.train()
        state = whole_state(runner)
        return {"trace": runner.trace, "results": dict(runner.results), "state": copied(state)}


def train_each(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train one configuration after the other in this process."""
    return [train(config, **options) for config, options in cases]
