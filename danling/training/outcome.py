"""The outcome of one update."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("danling")

UNCOMMITTED = "uncommitted"
"""Reason of an update that the replica groups did not commit: it is made again from the same batches."""


@dataclass(slots=True)
class UpdateOutcome:
    """The result of an update. Everything that advances with updates reads `committed` here, so that the decision is made once.

    Attributes:
        committed: Whether the optimizer stepped. The same on all ranks.
        weight: Global weight of the window: a float on the CPU, else a 0-dim float64 tensor on the device.
        loss_sum: Global weighted sum of the losses of the window, as `weight`.
        samples: Global number of samples of the window, as `weight`.
        grad_norm: Norm of the gradient of the update before clipping, 0-dim; `None` when it was not computed.
        reason: Why the update was not committed: `"overflow"`, `"nonfinite"`, `"weightless"` or what a fault-tolerance
            manager said; `None` when it was.
    """

    committed: bool
    weight: float | Tensor
    loss_sum: float | Tensor
    samples: float | Tensor
    grad_norm: float | Tensor | None = None
    reason: str | None = None

    @property
    def loss(self) -> float | Tensor:
        """The mean loss of the window over all micro-batches and ranks, `loss_sum / weight`, as `weight`; 0 without any weight."""
        if isinstance(self.weight, Tensor):
            return torch.where(self.weight != 0, self.loss_sum / self.weight, 0.0)
        return self.loss_sum / self.weight if self.weight else 0.0


class NonFiniteError(FloatingPointError):
    """The loss or the gradient of an update is not finite, and the run is not allowed to skip it."""


def no_gradient() -> ValueError:
    """Return the error for an overridden `backward` that has left no gradient although the window has a weight."""
    return ValueError(
        "Expected `backward` to leave a gradient on the parameters. Received: none on any. Call super().backward(loss) in it, or "
        "loss.backward()."
    )


class CountsSkips(Protocol):
    """Counters of a run."""

    global_step: int
    skipped_updates: int
    consecutive_skips: int


def count_skip(counters: CountsSkips, reason: str | None, *, limit: int | None) -> None:
    """Count a skipped update, and log it.

    Args:
        counters: What counts them.
        reason: Why it was skipped.
        limit: Number of skipped updates in a row that is permitted; `None` for any number.

    Raises:
        NonFiniteError: If there are more in a row.
    """
    counters.skipped_updates += 1
    counters.consecutive_skips += 1
    logger.warning("Update %d was skipped (%s).", counters.global_step + 1, reason)
    if limit is not None and counters.consecutive_skips > limit:
        raise NonFiniteError(
            f"Expected at most {limit} skipped updates in a row. Received: {counters.consecutive_skips} before step "
            f"{counters.global_step + 1} (the last one: {reason}). Look at the data and the learning rate, or raise "
            "max_skipped_updates."
        )
