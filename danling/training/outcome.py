"""How an update ended: whether the optimizer stepped, with which sums over all ranks, and the error that ends a run instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        # On a device the division is made everywhere, and a 0/0 replaced: asking for the weight would wait.
        if isinstance(self.weight, Tensor):
            return torch.where(self.weight != 0, self.loss_sum / self.weight, 0.0)
        return self.loss_sum / self.weight if self.weight else 0.0


class NonFiniteError(FloatingPointError):
    """The loss or the gradient of an update is not finite, and the run is not allowed to skip it."""
