"""Forward and backward of one update: its micro-batches, each moved, weighed and handed to `train_step`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from danling.data import Batch, BatchSource, DataLoader
from danling.reporting import Reporter

from .batch_loss import BatchLoss
from .batches import peek_target
from .passes import PassAgreement, run_window
from .retry import MemoryRetry
from .rollback import CountsMicroSteps
from .session import TrainingSession
from .weighing import BatchWeights
from .window import Window

logger = logging.getLogger("danling")


@dataclass(frozen=True)
class MicroBatchHooks:
    """What is called for every micro-batch, looked up anew each time, since a user may override it.

    Attributes:
        train_step: Runs forward and backward of a batch on the device.
        to_device: Returns the data of a batch on the device.
        batch_weight: `(data, target) -> weight` of the mean-reduced loss.
        count_tokens: Returns the tokens of a batch that was not moved yet.
        counter: Returns what counts the micro-batches.
        begin: Is called before the first micro-batch of an update.
    """

    train_step: Callable[[Any], Any]
    to_device: Callable[[Any], Any]
    batch_weight: Callable[[Any, Any], float | Tensor]
    count_tokens: Callable[[Any], float]
    counter: Callable[[], CountsMicroSteps]
    begin: Callable[[], None]


class MicroBatches:
    """Runs single micro-batches.

    Args:
        hooks: What the user may have overridden.
        window: The window that they are counted in.
        weights: Weighs them.
        loss: Is told what a `train_step` of the user's returned; `None` where it is the library's, which asks for the loss.
        reporter: Counts tokens, and the operations of the first one.
        session: Is told that a step is under way.
    """

    def __init__(
        self,
        hooks: MicroBatchHooks,
        *,
        window: Window,
        weights: BatchWeights,
        loss: BatchLoss | None,
        reporter: Reporter,
        session: TrainingSession,
    ) -> None:
        self._hooks = hooks
        self._window = window
        self._weights = weights
        self._loss = loss
        self._reporter = reporter
        self._session = session

    def run(self, batch: Batch, step: Callable[[Any], Any] | None = None) -> None:
        """Run forward and backward of a micro-batch of the open window.

        Args:
            batch: The batch, as its source gave it.
            step: What is called in the place of `train_step`.
        """
        hooks, window, reporter = self._hooks, self._window, self._reporter
        if window.count == 0:
            hooks.begin()
        data = hooks.to_device(batch.data)
        weight, samples = self._weights.weigh(batch, data, hooks.batch_weight, training=True)
        window.begin_microbatch(weight, samples)
        if reporter.telemetry is not None and batch.samples != 0:
            reporter.telemetry.tokens += hooks.count_tokens(batch.data)
        step = step or hooks.train_step
        self._session.in_step = True
        try:
            if reporter.flops.counts_next and samples:
                reporter.flops.count(partial(step, data), samples)
            else:
                returned = step(data)
                if self._loss is not None:
                    self._loss.observe_returned(returned, peek_target(data))
        finally:
            self._session.in_step = False
        hooks.counter().micro_step += 1

    def run_alone(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Run a batch that no loop has read, and return what its step returned.

        Args:
            step: The step.
            data: The batch.
        """
        returned: list[Any] = []
        self.run(Batch(data, None, None), lambda moved: returned.append(step(moved)))
        return returned[0]


class WindowForwards:
    """Runs the micro-batches of one update after the other.

    Args:
        agreement: Keeps the ranks together.
        window: The window that they are counted in.
        size: Returns the micro-batches of an update that is not divided.
        run: Runs one of them.
        retried: Makes an update again where memory ran out; `None` where that is an error.
    """

    def __init__(
        self,
        *,
        agreement: PassAgreement,
        window: Window,
        size: Callable[[], int],
        run: Callable[[Batch], None],
        retried: RetriedForwards | None = None,
    ) -> None:
        self.agreement = agreement
        self._window = window
        self._size = size
        self._run = run
        self._retried = retried

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come.

        Args:
            source: The batches of the split.
            batches: What is left of the pass on this rank.
            consumed: Is filled with the micro-batches.
        """
        retried, loader = self._retried, source.loader
        make = partial(
            run_window,
            batches,
            consumed,
            size=self._size(),
            following=partial(self.agreement.next_of_window, source, batches),
            run=self._run_one,
        )
        held = loader.held_at_once if retried is not None and isinstance(loader, DataLoader) else 0
        if retried is None or held == 0:
            make()
            return True
        return retried.run(make, held)

    def _run_one(self, batch: Batch, closes: bool) -> None:
        # A rank that may run out of memory reduces once all have come through.
        self._window.reduces = closes and self._retried is None
        self._run(batch)


class RetriedForwards:
    """Makes the forwards of an update again in smaller micro-batches where memory ran out.

    Args:
        retry: Takes them back on all ranks.
        window: The window that they are counted in.
        several: Whether several ranks make updates together.
        alike: Gives all ranks the same buffers, where a forward would do so otherwise; `None` where none would.
        remember: Returns what puts back what a forward writes to.
        zero: Drops the gradient.
        hold_at_most: Has micro-batches of at most so many samples read from now on.
        reporter: Counts the tokens and the operations.
        step: Returns the updates committed.
        speaks: Whether this process logs.
    """

    def __init__(
        self,
        retry: MemoryRetry,
        *,
        window: Window,
        several: bool,
        alike: Callable[[], None] | None,
        remember: Callable[[], Callable[[], None]],
        zero: Callable[[], None],
        hold_at_most: Callable[[int], None],
        reporter: Reporter,
        step: Callable[[], int],
        speaks: bool,
    ) -> None:
        self._retry = retry
        self._window = window
        self._several = several
        self._alike = alike
        self._remember = remember
        self._zero = zero
        self._hold_at_most = hold_at_most
        self._reporter = reporter
        self._step = step
        self._speaks = speaks

    def run(self, make: Callable[[], None], held: int) -> bool:
        """Make the forwards of an update; `False` where memory ran out, and smaller micro-batches are to come.

        Args:
            make: Makes them, without communication.
            held: Samples that a rank holds at once.
        """
        return self._retry.run(make, held=held, prepare=self._prepare, remember=self._remembered, shrink=self._shrink)

    def _prepare(self, held: int) -> None:
        """Do before an update what ranks otherwise do together within it: all of them have to come through it alone."""
        if self._alike is not None:
            self._alike()
        if self._window.agreed_reference is None and self._several:
            self._window.agreed_reference = float(held)

    def _remembered(self) -> Callable[[], None]:
        """Return what takes the micro-batches of the next update back."""
        telemetry, flops = self._reporter.telemetry, self._reporter.flops
        assert telemetry is not None
        put_back, tokens, counts_next = self._remember(), telemetry.tokens, flops.counts_next

        def take_back() -> None:
            self._window.reset()
            self._zero()
            put_back()
            telemetry.tokens, flops.counts_next = tokens, counts_next

        return take_back

    def _shrink(self, held: int, samples: int) -> None:
        """Go on with smaller micro-batches, and say so."""
        self._hold_at_most(samples)
        if self._speaks:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                self._step() + 1,
                held,
                samples,
                samples,
            )
