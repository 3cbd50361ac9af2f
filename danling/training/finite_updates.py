"""Whether the updates were finite: what an accelerator reports later, and the error that names rank, parameter and sample."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from danling.distributed import HostCopy, StepSync, StepTotals

from .bad_samples import GivenBatches
from .outcome import NonFiniteError

logger = logging.getLogger("danling")


class _Unchecked(NamedTuple):
    """An update that was made before the host knew whether it is finite."""

    step: int
    checks: HostCopy
    """Whether loss and gradient are finite; whether the window weighs anything, where the host does not know."""
    nonfinite: float | Tensor
    """Whether the loss of this rank is not finite."""
    given: GivenBatches


class FiniteUpdates:
    """The checks of updates that an accelerator makes before the host knows whether they are finite, and the error of one that is not."""

    def __init__(self, sync: StepSync) -> None:
        self._sync = sync
        self._unchecked: list[_Unchecked] = []
        """Updates that are made, whose checks are on their way to the host."""
        self._has_warned = False
        """Whether an update was named that weighs nothing."""

    def note(
        self, step: int, checks: Tensor, nonfinite: float | Tensor, given: GivenBatches
    ) -> None:
        """Note the checks of an update that is made now. The host does not wait for them."""
        self._unchecked.append(_Unchecked(step, HostCopy(checks), nonfinite, given))

    def check_before(self, step: int | None) -> None:
        """Check what an accelerator has reported of the updates before `step`, or of all updates for `None`."""
        # Several optimizers leave a check each in one update.
        while self._unchecked and (step is None or self._unchecked[0].step < step):
            unchecked = self._unchecked.pop(0)
            finite, *weighs = unchecked.checks.read()
            if not finite:
                self._unchecked.clear()
                # Without names of gradients, since those of that update have been dropped.
                raise self.error(unchecked.step, unchecked.nonfinite, None, unchecked.given)
            if weighs == [False] and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "Update %d weighs nothing, since all its targets are ignored: it was made with a gradient of zero, and momentum and "
                    "decay have moved the weights. Set skip_nonfinite_grad to leave such updates out, for which the host waits for the "
                    "device once in an update. Others like it are not logged.",
                    unchecked.step,
                )

    def error(
        self, step: int, own: float | Tensor, gradients: list[str] | None, given: GivenBatches
    ) -> NonFiniteError:
        """Return the error of an update, with what each rank knows of it. Called on all ranks.

        Args:
            step: The number of the update.
            own: Whether the loss of this rank is not finite.
            gradients: Names of parameters whose gradients are not finite on this rank; `None` where they are dropped already.
            given: The batches of this rank.
        """
        # All ranks know that the update is not finite, from the same sums, so all are here.
        found = self._sync.domain.gather_objects((bool(own), gradients or [], given.bad_sample()))
        ranks = [rank for rank, (bad, _, _) in enumerate(found) if bad]
        names = list(dict.fromkeys(name for _, of_rank, _ in found for name in of_rank))[:5]
        samples = [
            f"{sample} on rank {rank}" for rank, (_, _, sample) in enumerate(found) if sample
        ]
        fix = "Lower the learning rate, set max_grad_norm, or set skip_nonfinite_grad to leave such updates out."
        if samples:
            fix = f"The data has {'; '.join(samples[:3])}. Look at that first. If the value is meant: {fix[0].lower()}{fix[1:]}"
        elif all(sample == "" for _, _, sample in found):
            fix = f"The data of the update is finite. {fix}"
        received = f"a loss that is not finite on ranks {ranks}, and gradients that are not finite for {names or 'no parameter'}"
        if gradients is None:
            received = f"a loss that is not finite on ranks {ranks}, and gradients that have been dropped since"
        elif not ranks and not names:
            received = "a norm of the gradient that is not finite, since the squares of its elements are too large to add up"
        return NonFiniteError(
            f"Expected a finite loss and gradient at step {step}. Received: {received}. {fix}"
        )

    def log_pending(self) -> None:
        """Log the error that the next update would raise, where none follows. May be called on one rank."""
        left, self._unchecked = self._unchecked, []
        with suppress(RuntimeError):  # a device that has failed cannot be read
            bad = next((each.step for each in left if not each.checks.read()[0]), None)
            if bad is not None:
                logger.error(
                    "The loss or the gradient of update %d was not finite. It was made, and nothing has been saved or evaluated since. "
                    "Resume from the last checkpoint; lower the learning rate, set max_grad_norm, or set skip_nonfinite_grad to leave "
                    "such updates out.",
                    bad,
                )


def checks_on_device(totals: StepTotals, grad_norm: Tensor) -> Tensor:
    """Return whether loss and gradient are finite, and whether there is a weight where that is on the device, of one dimension.

    Those who read it later know what each place means: a reason that only skips is in `UpdateStep._reason_to_skip` alone.
    """
    finite = torch.isfinite(grad_norm)
    if isinstance(totals.nonfinite, Tensor):
        finite = finite & (totals.nonfinite == 0)
    if isinstance(totals.weight, Tensor):
        return torch.stack([finite, totals.weight != 0])
    return finite.reshape(1)
