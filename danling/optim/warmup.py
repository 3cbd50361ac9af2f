"""Learning-rate schedules with a warm-up."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from danling.utils.messages import number_hint

logger = logging.getLogger("danling")


class WarmupScheduler(LRScheduler):
    """A linear warm-up, then its own shape, as a factor of every group's base rate.

    The rate is a function of the number of updates made. Update `n`, counted from 0, runs at `(n + 1) / warmup_steps` of the base
    rate while it warms up: the first one is not wasted at zero. After that the shape falls from 1 at `warmup_steps` to
    `final_lr_ratio` at `total_steps`, and stays there.

    A state that was saved by a run of another length is taken up: the position is the saved one, the curve is this object's.

    Args:
        optimizer: The optimizer.
        total_steps: Updates of the whole run.
        warmup_steps: Updates of the warm-up; below 1 a share of `total_steps`.
        final_lr_ratio: Share of the base rate at the end.
        last_epoch: Updates made so far, less one.

    Raises:
        ValueError: If `total_steps` is not given or not positive, or another figure is negative.
    """

    kept_options: ClassVar[tuple[str, ...]] = (
        "total_steps",
        "warmup_steps",
        "decay_steps",
        "final_lr_ratio",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: float = 0,
        final_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = self._checked_total(total_steps)
        self.warmup_steps = _count("warmup_steps", warmup_steps, self.total_steps)
        if not final_lr_ratio >= 0:
            raise ValueError(
                f"Expected scheduler.final_lr_ratio >= 0. Received: final_lr_ratio={final_lr_ratio!r}."
            )
        self.final_lr_ratio = float(final_lr_ratio)
        if self.warmup_steps > self.total_steps and self.final_lr_ratio != 1.0:
            logger.warning(
                "scheduler.warmup_steps=%d exceeds total_steps=%d: the learning rate never reaches its base.",
                self.warmup_steps,
                self.total_steps,
            )
        super().__init__(optimizer, last_epoch)

    def _checked_total(self, total_steps: int | None) -> int:
        if total_steps is None or total_steps < 1:
            raise ValueError(
                f"Expected scheduler.total_steps >= 1 for {type(self).__name__}. Received: total_steps={total_steps!r}. Set it, or "
                "set `steps`, or `epochs` with loaders that have a length."
            )
        return int(total_steps)

    def factor(self, step: int) -> float:
        """Return the share of the base rate after `step` updates."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        start = self._start()
        done = 1.0
        if step < self.total_steps:
            done = (step - start) / (self.total_steps - start) if step > start else 0.0
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * self.shape(done)

    def _start(self) -> int:
        return self.warmup_steps

    def shape(self, done: float) -> float:
        """Return a value that falls from 1 to 0 as `done` goes from 0 to 1."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups at the current position."""
        groups = self.optimizer.param_groups
        factor = self.factor(self.last_epoch)
        for group in groups[len(self.base_lrs) :]:  # added in the run: from its own rate
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        return [base * factor for base in self.base_lrs]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a saved position. Restore the optimizer first."""
        stored = state_dict.get("base_lrs")
        if stored is None or len(stored) != len(self.base_lrs):
            raise ValueError(
                f"Expected the state of a scheduler over {len(self.base_lrs)} parameter groups. Received: base_lrs={stored}. Restore "
                "optim.param_groups and scheduler.type, or add 'scheduler' to checkpoint.exclude_from_loading."
            )
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name not in self.kept_options}
        )
        if any(state_dict.get(name) != getattr(self, name, None) for name in self.kept_options):
            rewrite_rates(self)


def rewrite_rates(scheduler: LRScheduler) -> None:
    """Write the rates of the scheduler's position into its optimizer, which still holds those of another curve."""
    rates = scheduler.get_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _count(name: str, value: float, total: int) -> int:
    """Return a number of updates; a value below 1 is a share of `total`."""
    if isinstance(value, str) or value is None or not value >= 0:
        raise ValueError(
            f"Expected scheduler.{name} to be a number >= 0: updates, or below 1 a share of the run. Received: {name}={value!r}."
            f"{number_hint(value)}"
        )
    return round(value * total) if value < 1 else int(value)


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
    """The base rate after the warm-up.

    Args:
        optimizer: The optimizer.
        total_steps: Updates of the whole run; needed only where `warmup_steps` is a share of it.
        warmup_steps: Updates of the warm-up; below 1 a share of `total_steps`.
        last_epoch: Updates made so far, less one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: float = 0,
        last_epoch: int = -1,
    ) -> None:
        # A constant rate needs the length of the run only to know its share of it.
        share = 0 < warmup_steps < 1
        super().__init__(
            optimizer, total_steps if share or total_steps else 1, warmup_steps, 1.0, last_epoch
        )

    def shape(self, done: float) -> float:
        """Return 1."""
        return 1.0


class WSDSchedule(WarmupScheduler):
    """Warm-up, a stable stretch at the base rate, then a linear decay over the last `decay_steps` updates (Hu et al., 2024).

    Args:
        optimizer: The optimizer.
        total_steps: Updates of the whole run.
        warmup_steps: Updates of the warm-up; below 1 a share of `total_steps`.
        decay_steps: Updates of the decay; below 1 a share of `total_steps`. It never begins before the warm-up has ended.
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
        self.decay_steps = _count("decay_steps", decay_steps, self._checked_total(total_steps))
        super().__init__(optimizer, total_steps, warmup_steps, final_lr_ratio, last_epoch)

    def _start(self) -> int:
        return max(self.total_steps - self.decay_steps, self.warmup_steps)

    def shape(self, done: float) -> float:
        """Return `1 - done`."""
        return 1.0 - done
