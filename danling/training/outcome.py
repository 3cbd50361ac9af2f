"""What became of one update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class UpdateOutcome:
    """The one report that leaves an update; whatever advances with it reads `committed` here and decides nothing itself.

    Attributes:
        committed: Whether the optimizer stepped. The same on all ranks.
        weight: Global weight of the window: a float on the CPU, else a 0-dim float64 tensor on the device.
        loss: Global weighted sum of the losses of the window, as `weight`; divide by `weight` for the mean.
        samples: Global number of samples of the window, as `weight`.
        grad_norm: Norm of the gradient of the update before clipping, 0-dim; `None` when it was not computed.
        reason: Why the update was not committed: `"overflow"`, `"nonfinite"`, `"weightless"` or what a fault-tolerance
            manager said; `None` when it was.
    """

    committed: bool
    weight: float | Tensor
    loss: float | Tensor
    samples: float | Tensor
    grad_norm: float | Tensor | None = None
    reason: str | None = None


class NonFiniteError(FloatingPointError):
    """The loss or the gradient of an update is not finite, and the run is not allowed to skip it."""
