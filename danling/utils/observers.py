"""Observers: classes that are told of the events of a training by the loop, and are named by nothing that makes updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import Tensor

if TYPE_CHECKING:
    from danling.distributed import StepTotals
    from danling.training.update import UpdateOutcome

logger = logging.getLogger("danling")


class Observer:
    """Watches a training. Override the events that you need, and append an object to `runner.observers` on all ranks.

    The loop calls each event on all ranks, in the order of the list. An event that ends something is called after a failure too. An
    observer draws no random numbers, and communicates only in events whose text allows it. If it raises an exception, the exception is
    logged and the observer is removed, unless it is `critical`; then the exception ends the training.
    """

    critical: ClassVar[bool] = False

    # A training

    def training_started(self) -> None:
        """A training begins, before the model is put into training mode. May communicate.

        That is `train`, a `train_epoch` that you call, `runner.session()`, or, in your own loop without it, the first `train_step`.
        """

    def training_failed(self, error: Exception) -> None:
        """The training ends with an error, maybe on this rank only. `training_ended` follows."""

    def training_ended(self) -> None:
        """The training is over, and its last save is made.

        Your own loop without `runner.session()` ends at the next training or at `runner.close()`.
        """

    # A pass

    def pass_started(self, split: str) -> None:
        """A pass over a split begins, or continues after a resume. May communicate."""

    def pass_ended(self, split: str) -> None:
        """A pass over a split is complete. Not called if the training stops within it. May communicate."""

    def batch_wait_started(self) -> None:
        """The loop asks for the next batch to train on."""

    def batch_wait_ended(self) -> None:
        """The batch is there, or the loader has no more."""

    # An update

    def update_started(self) -> None:
        """Before the first micro-batch of an update; called again if its micro-batches are computed again."""

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """A micro-batch is on the device, before its forward. Not called for padding.

        Args:
            data: The batch, on the device.
            read: The same batch as the loader returned it.
            samples: Its number of samples.
        """

    def micro_batch_ended(self) -> None:
        """Forward and backward of a micro-batch are over. Not called for padding."""

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """The gradient is reduced and divided by its weight, and not clipped yet. It may be non-finite. May communicate.

        Args:
            totals: Sums over all ranks.
            norm: Its 2-norm, 0-dim.
        """

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """An update was made or skipped. May communicate."""

    def boundary_reached(self) -> None:
        """A loop by hand that does not call `runner.step()` is between two updates: it calls `runner.boundary()`."""

    # Evaluations and saves

    def evaluation_started(self, split: str) -> None:
        """An evaluation of a split begins, in a training or on its own."""

    def evaluation_batch_started(self, split: str, number: int) -> None:
        """A batch of an evaluation is about to be evaluated; `number` counts from 0. In a training also where this rank has none left."""

    def evaluation_ended(self, split: str) -> None:
        """The evaluation is over."""

    def save_started(self) -> None:
        """A save of the full state begins."""

    def save_ended(self) -> None:
        """The state is copied; the write may continue in the background."""

    def results_needed(self) -> None:
        """The state will be saved or evaluated: what was postponed is due. May communicate."""


EVENTS = tuple(name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_"))


class Observers(MutableSequence[Observer]):
    """The observers of a runner, in the order in which they are called.

    Attributes:
        heard: The methods to call by event: without the events that no observer overrides. Made when observers are added or removed.
    """

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self.heard: dict[str, tuple[tuple[Observer, Callable[..., None]], ...]] = {}

    def notify(self, event: str, *args: object, **named: object) -> None:
        """Call an event of every observer that overrides it."""
        for observer, call in self.heard.get(event, ()):
            try:
                call(*args, **named)
            except Exception:
                if observer.critical:
                    raise
                logger.exception("The observer %s failed and is dropped.", type(observer).__name__)
                self.remove(observer)

    def _bind(self) -> None:
        """Look which observers override which events."""
        self.heard = {}
        for event in EVENTS:
            base = getattr(Observer, event)
            listening = [each for each in self._observers if getattr(type(each), event) is not base]
            if listening:
                self.heard[event] = tuple((each, getattr(each, event)) for each in listening)

    # A sequence

    @overload
    def __getitem__(self, index: int) -> Observer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Observer]: ...

    def __getitem__(self, index: int | slice) -> Observer | list[Observer]:
        return self._observers[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._observers[index] = value
        self._bind()

    def __delitem__(self, index: int | slice) -> None:
        del self._observers[index]
        self._bind()

    def __len__(self) -> int:
        return len(self._observers)

    def insert(self, index: int, value: Observer) -> None:
        """Add an observer before another one."""
        self._observers.insert(index, value)
        self._bind()

    def __repr__(self) -> str:
        return repr(self._observers)
