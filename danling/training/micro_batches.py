"""Forward and backward of one update: its micro-batches, each moved, weighed and handed to `train_step`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from danling.data import Batch, BatchSource, DataLoader
from danling.metrics import TrainMetrics
from danling.reporting import Reporter

from .batches import note_batch, peek_target
from .carry import map_carry
from .keys import RandomKeys
from .outputs import prediction_of
from .passes import PassAgreement
from .recompute import Recompute
from .reduction import GradientReduction
from .retry import MemoryRetry
from .session import TrainingSession
from .weighing import BatchWeights
from .window import Window

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


class CountsMicroSteps(Protocol):
    """What counts the micro-batches of a run."""

    micro_step: int


class Progress(Protocol):
    """Where a run stands."""

    @property
    def train(self) -> CountsMicroSteps:
        """What counts the micro-batches."""


class MicroBatchHooks(Protocol):
    """What is asked of a run for every micro-batch. It is looked up anew each time, since a user may override or replace it."""

    carry: Any

    @property
    def state(self) -> Progress:
        """Where the run stands."""

    @property
    def reduction(self) -> GradientReduction:
        """Is told where an update begins."""

    def train_step(self, data: object) -> object:
        """Run forward and backward of a batch on the device."""

    def _run_train_step(self, step: Callable[[Any], Any], data: object) -> object:
        """Call a step the way the stack calls it."""

    def to_device(self, data: object) -> object:
        """Return the data of a batch on the device."""

    def batch_weight(self, data: object, target: object) -> float | Tensor:
        """Return what the mean-reduced loss of a batch is averaged over."""

    def count_tokens(self, data: object) -> float:
        """Return the tokens of a batch that was not moved yet."""


class BatchRecorder(Protocol):
    """What records the first updates; see `danling.audit.layout_record`."""

    def took(self, data: object, moved: object, *, counts: bool) -> object:
        """Return the data of a micro-batch as it is trained on."""

    def ran(self) -> None:
        """Look at what forward and backward have left."""


class MicroBatches:
    """Runs single micro-batches."""

    def __init__(
        self,
        hooks: MicroBatchHooks,
        *,
        keys: RandomKeys,
        window: Window,
        weights: BatchWeights,
        reporter: Reporter,
        session: TrainingSession,
    ) -> None:
        self._hooks = hooks
        self._keys = keys
        self._window = window
        self._weights = weights
        self._reporter = reporter
        self._session = session
        self.recompute: Recompute | None = None
        self.metrics: TrainMetrics | None = None
        self.recorder: BatchRecorder | None = None
        self.split = ""

    def run(self, batch: Batch) -> None:
        """Run forward and backward of a micro-batch of the open window."""
        self._run(batch, self._hooks.train_step)

    def _run(self, batch: Batch, step: Callable[[Any], object]) -> object:
        hooks, window, reporter = self._hooks, self._window, self._reporter
        if window.count == 0:
            hooks.reduction.begin(first=window.is_first)
            if self._session.observers:
                self._session.observers.notify("update_started")
        if self.recompute is not None:
            self.recompute.check(batch.data)
        self._keys.begin_micro_batch(batch.data, batch.place, window.count)
        data = hooks.to_device(batch.data)
        if self.recorder is not None:
            data = self.recorder.took(batch.data, data, counts=batch.samples != 0)
        weight, samples = self._weights.weigh(batch, data, hooks.batch_weight, training=True)
        window.begin_microbatch(weight, samples)
        observed = bool(self._session.observers) and batch.samples != 0
        if observed:
            self._session.observers.notify("micro_batch_started", data, read=batch.data, samples=samples)
        if reporter.telemetry is not None and batch.samples != 0:
            reporter.telemetry.tokens += hooks.count_tokens(batch.data)
        returned: list[object] = []

        def call() -> None:
            returned.append(hooks._run_train_step(step, data))

        self._session.in_step = True
        try:
            if reporter.flops.counts_next and samples:
                reporter.flops.count(call, samples)
            else:
                call()
            if self.metrics is not None:
                self._measure(self.metrics, returned[0], data, samples)
        except Exception as error:
            note_batch(error, "train_step", self.split, data)
            raise
        finally:
            self._session.in_step = False
            if observed:
                self._session.observers.notify("micro_batch_ended")
        if hooks.carry is not None:
            hooks.carry = map_carry(hooks.carry, Tensor.detach)
        if self.recorder is not None:
            self.recorder.ran()
        hooks.state.train.micro_step += 1
        return returned[0]

    def _measure(self, metrics: TrainMetrics, returned: Any, data: object, samples: float) -> None:
        """Take the prediction of a micro-batch into the metrics of training."""
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise ValueError(
                "Expected `train_step` to return the prediction and the loss, of which train_metrics are computed. Received: "
                f"{type(returned).__name__}. End it with `return pred, loss`."
            )
        if returned[0] is None:
            return  # another stage of a pipeline has it
        pred = prediction_of(returned[0])
        with torch.no_grad():
            metrics.update(pred.detach() if isinstance(pred, Tensor) else pred, peek_target(data), samples)

    def run_alone(self, step: Callable[[Any], Any], data: object) -> object:
        """Run a batch that no loop has read, and return what its step returned."""
        return self._run(Batch(data, None, None), step)


class Forwards(Protocol):
    """What runs the micro-batches of an update."""

    agreement: PassAgreement

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come."""


class WindowForwards:
    """Runs the micro-batches of one update after the other."""

    def __init__(
        self,
        *,
        agreement: PassAgreement,
        window: Window,
        size: Callable[[], int],
        run: Callable[[Batch], None],
        reduces_later: bool = False,
    ) -> None:
        self.agreement = agreement
        self._window = window
        self._size = size
        self._run = run
        self._reduces_later = reduces_later

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; the last micro-batch, which reduces the gradient, is known when it is run."""
        size, window = self._size(), self._window
        batch = next(batches, None)
        while batch is not None:
            consumed.append(batch)
            closes = len(consumed) == size if batch.closes is None else batch.closes
            upcoming = None if closes else self.agreement.next_of_window(source, batches)
            window.reduces = upcoming is None and not self._reduces_later
            self._run(batch)
            batch = upcoming
        return True


class RetriedForwards:
    """Runs the micro-batches of an update again in smaller ones where memory ran out."""

    def __init__(
        self,
        forwards: WindowForwards,
        retry: MemoryRetry,
        *,
        runner: TorchRunner,
        recompute: Recompute,
        hold_at_most: Callable[[int], None],
    ) -> None:
        self.agreement = forwards.agreement
        self._forwards = forwards
        self._retry = retry
        self._runner = runner
        self._recompute = recompute
        self._hold_at_most = hold_at_most

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come."""
        runner, loader = self._runner, source.loader
        held = loader.held_at_once if isinstance(loader, DataLoader) else 0
        make = partial(self._forwards.run, source, batches, consumed)
        if held == 0:
            return make()
        # What ranks otherwise do together within an update comes before it: each of them has to come through it alone.
        if runner.preparation.broadcasts_buffers:
            runner.broadcast_buffers()
        if runner.window.agreed_reference is None and runner.placement.optimizer.size > 1:
            runner.window.agreed_reference = float(held)
        if held == 1:
            # Nothing is left to halve: the user gets the error with its traceback.
            return make()
        if self._retry.attempt(make, self._recompute.remember()):
            return True
        self._hold_at_most(held // 2)
        if runner.is_main_process:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                runner.state.train.global_step + 1,
                held,
                held // 2,
                held // 2,
            )
        return False
