"""Learning-rate schedules by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .registry import Registry


class WarmupScheduler(LRScheduler):
    """A linear warm-up, then a shape of its own, as a factor of every group's base rate.

    Update `n`, counted from 0, runs at `(n + 1) / warmup_steps` of the base rate while it warms up, so the first one is not wasted
    at zero. After that the shape falls from 1 to `final_lr_ratio`, which it reaches with the last update of the run.

    Args:
        optimizer: The optimizer.
        total_steps: Updates of the whole run.
        warmup_steps: Updates of the warm-up; below 1 a share of `total_steps`.
        final_lr_ratio: Share of the base rate at the end.
        last_epoch: Updates made so far, less one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: float = 0,
        final_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None or total_steps < 1:
            raise ValueError(
                f"Expected scheduler.total_steps >= 1 for {type(self).__name__}. Received: total_steps={total_steps!r}. Set it, or "
                "set `steps`, or `epochs` with loaders that have a length."
            )
        if not 0 <= final_lr_ratio:
            raise ValueError(f"Expected scheduler.final_lr_ratio >= 0. Received: final_lr_ratio={final_lr_ratio!r}.")
        if warmup_steps < 0:
            raise ValueError(f"Expected scheduler.warmup_steps >= 0. Received: warmup_steps={warmup_steps!r}.")
        self.total_steps = int(total_steps)
        self.warmup_steps = int(total_steps * warmup_steps) if 0 < warmup_steps < 1 else int(warmup_steps)
        self.final_lr_ratio = final_lr_ratio
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the share of the base rate at update `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self.total_steps - 1 - self.warmup_steps
        done = min((step - self.warmup_steps) / left, 1.0) if left > 0 else 1.0
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * self.shape(done)

    def shape(self, done: float) -> float:
        """Return a value that falls from 1 to 0 as `done` goes from 0 to 1."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rates of the groups at the current update."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


class LinearSchedule(WarmupScheduler):
    """A straight line down after the warm-up."""

    def shape(self, done: float) -> float:
        """Return `1 - done`."""
        return 1.0 - done


class CosineSchedule(WarmupScheduler):
    """Half a cosine down after the warm-up (Loshchilov and Hutter, 2017, without restarts)."""

    def shape(self, done: float) -> float:
        """Return `(1 + cos(pi * done)) / 2`."""
        return 0.5 * (1.0 + math.cos(math.pi * done))


class ConstantSchedule(WarmupScheduler):
    """The base rate after the warm-up; the length of the run does not matter."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, max(int(warmup_steps), 1), warmup_steps, 1.0, last_epoch)

    def shape(self, done: float) -> float:
        """Return 1."""
        return 1.0


class WSDSchedule(WarmupScheduler):
    """Warm-up, a stable stretch at the base rate, then a linear decay over the last `decay_steps` updates (Hu et al., 2024).

    Args:
        optimizer: The optimizer.
        total_steps: Updates of the whole run.
        warmup_steps: As for every warm-up schedule.
        decay_steps: Updates of the decay; below 1 a share of `total_steps`.
        final_lr_ratio: Share of the base rate at the end.
        last_epoch: Updates made so far, less one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: float = 0,
        decay_steps: float = 0.1,
        final_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.decay_steps = max(int((total_steps or 1) * decay_steps) if 0 < decay_steps < 1 else int(decay_steps), 1)
        super().__init__(optimizer, total_steps, warmup_steps, final_lr_ratio, last_epoch)

    def factor(self, step: int) -> float:
        """Return the share of the base rate at update `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - (self.total_steps - 1 - self.decay_steps)) / self.decay_steps
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * (1.0 - min(max(done, 0.0), 1.0))


class SchedulerRegistry(Registry):
    """Every scheduler of `torch.optim.lr_scheduler` by its lower-case name, the warm-up schedules, and what users register."""

    def build(self, optimizer: Any, type: str, **options: Any) -> Any:
        """Build a scheduler.

        Args:
            optimizer: The optimizer.
            type: Its name.
            **options: Its arguments.

        Raises:
            ValueError: If the name or an option is unknown.
        """
        self.check_options(type, options)
        return self.lookup(type)(optimizer, **options)


def needs_metric(scheduler: Any) -> bool:
    """Whether `scheduler.step` wants the value of a metric, as `ReduceLROnPlateau` does."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    step = getattr(type(scheduler), "step", None)
    parameters = list(inspect.signature(step).parameters.values())[1:] if step is not None else []
    return any(p.name in ("metrics", "metric") and p.default is inspect.Parameter.empty for p in parameters)


def _torch_schedulers() -> dict[str, Any]:
    module = torch.optim.lr_scheduler
    classes = inspect.getmembers(module, inspect.isclass)
    known = {n.lower(): c for n, c in classes if issubclass(c, LRScheduler) and c is not LRScheduler and not n.startswith("_")}
    known["reducelronplateau"] = ReduceLROnPlateau
    known.update(linear=LinearSchedule, cosine=CosineSchedule, constant=ConstantSchedule, wsd=WSDSchedule)
    return known


SCHEDULERS = SchedulerRegistry("scheduler", _torch_schedulers())
"""Schedulers by name: `SCHEDULERS.build(optimizer, type="cosine", total_steps=1000, warmup_steps=100)`."""
