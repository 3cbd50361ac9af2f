"""Observers: what watches a training from outside of the code that makes updates."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from danling.distributed import StepTotals

    from .outcome import UpdateOutcome

logger = logging.getLogger("danling")


class Observer:
    """Watches a training; override the events that you need, and append it to `runner.observers`, on all ranks.

    Events are called on all ranks, in the order of the list. An observer draws no random numbers. If it raises an exception, the
    exception is logged and the observer dropped, unless it is `critical`; then the exception ends the training.
    """

    critical: ClassVar[bool] = False

    def training_started(self) -> None:
        """A training begins, or the first update of a loop of the user's."""

    def micro_batch_started(self, data: object, *, first: bool) -> None:
        """A micro-batch is on the device, before its forward; `first` of its update. Not called for padding."""

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """The gradient is reduced and divided by its weight, not yet clipped; `norm` is its 2-norm, 0-dim.

        `totals` are the sums over all ranks. Whether the update is made is not decided yet: the gradient may be non-finite.
        """

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """An update was made or skipped."""

    def results_needed(self) -> None:
        """The state will be saved or evaluated: what was postponed is due. May communicate."""


class Observers(list[Observer]):
    """The observers of a runner, in the order in which they are called."""

    def notify(self, event: str, *args: object, **named: object) -> None:
        """Call an event of every observer."""
        for observer in tuple(self):
            try:
                getattr(observer, event)(*args, **named)
            except Exception:
                if observer.critical:
                    raise
                logger.exception("The observer %s failed and is dropped.", type(observer).__name__)
                self.remove(observer)
