"""Whether an update is made, the same on all ranks, and what comes of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danling.distributed import StepTotals
from danling.utils.protocols import ReductionDomain

if TYPE_CHECKING:
    from danling.runners.state import TrainState

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


def no_outcome(received: object) -> ValueError:
    """Return the error for an overridden `step` that returns something else than an outcome."""
    return ValueError(
        f"Expected `step` to return an UpdateOutcome. Received: {received!r}. Return that of super().step()."
    )


def count_skip(counters: TrainState, reason: str | None, *, limit: int | None) -> None:
    """Count a skipped update, and log it."""
    counters.skipped_updates += 1
    counters.consecutive_skips += 1
    logger.warning("Update %d was skipped (%s).", counters.global_step + 1, reason)
    if limit is not None and counters.consecutive_skips > limit:
        raise NonFiniteError(
            f"Expected at most {limit} skipped updates in a row. Received: {counters.consecutive_skips} before step "
            f"{counters.global_step + 1} (the last one: {reason}). Look at the data and the learning rate, or raise "
            "max_skipped_updates."
        )


class UpdateDecision:
    """Decides from the totals of a window and the norm of its gradient.

    On the CPU the result of the check is available at once. On an accelerator, a run that may not skip updates does not wait for the
    device: it reads the result one update later, and before anything is evaluated or saved.
    """

    def __init__(self, domain: ReductionDomain, device: torch.device) -> None:
        self.domain = domain
        self.device = device
        self._pending: tuple[int, Tensor, float | Tensor] | None = None

    def objection(
        self,
        totals: StepTotals,
        grad_norm: Tensor,
        *,
        step: int,
        own_nonfinite: float | Tensor,
        scales: bool,
        may_skip: bool,
        named: Callable[[], list[str]],
    ) -> str | None:
        """Return why the update must not be made, `None` if it is made. Call on all ranks."""
        if isinstance(totals.weight, float) and totals.weight == 0.0:
            return "weightless"
        if self.device.type == "cpu":
            finite = not totals.nonfinite and math.isfinite(grad_norm.item())
        else:
            healthy = torch.isfinite(grad_norm) & (torch.as_tensor(totals.nonfinite, device=self.device) == 0)
            if not (scales or may_skip):
                self.raise_pending()
                self._pending = (step, healthy, own_nonfinite)
                return None
            finite = bool(healthy)
        if finite:
            return None
        if scales or may_skip:
            return "overflow" if scales else "nonfinite"
        raise self.error(step, own_nonfinite, named())

    def raise_pending(self) -> None:
        """Check the last update now, if that is still to be done. Call on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None and not bool(pending[1]):
            # The gradients of that update are gone.
            raise self.error(pending[0], pending[2], None)

    def error(self, step: int, own_nonfinite: float | Tensor, gradients: list[str] | None) -> NonFiniteError:
        """Return the error that says where an update is not finite. Call on all ranks."""
        found = self.domain.gather_objects((bool(own_nonfinite), gradients or []))
        ranks = [rank for rank, (bad, _) in enumerate(found) if bad]
        names = list(dict.fromkeys(name for _, of_rank in found for name in of_rank))[:5]
        where = f"gradients that are not finite for {names or 'no parameter'}"
        if gradients is None:
            where = "gradients that have been dropped since"
        return NonFiniteError(
            f"Expected a finite loss and gradient at step {step}. Received: a loss that is not finite on ranks {ranks}, and "
            f"{where}. Lower the learning rate, set max_grad_norm, or set skip_nonfinite_grad to leave such updates out."
        )
