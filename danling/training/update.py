"""One update, from its first micro-batch to everything that advances with it: read `UpdateStep` from top to bottom.

    window -> weights -> forward and backward -> the one collective -> the decision -> clipping -> optimizer -> schedule, EMA, counters

What users may override is asked of the runner; what a stack does otherwise than another one is in `danling.training.reduction`.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.data import PLACEHOLDER, Batch, BatchSource, DataLoader
from danling.data.run_data import RunData
from danling.distributed import GradientNorms, MembershipChanged, StepSync, StepTotals
from danling.metrics import Meters, TrainMetrics
from danling.optim import JointScheduler
from danling.optim.state import rates_of
from danling.supervision.failures import is_out_of_memory
from danling.utils.devices import free_unused_memory
from danling.utils.hooks import is_overridden
from danling.utils.tensors import local_part, whole

from .bad_samples import GivenBatches
from .batch_weights import BatchLoss
from .batches import check_returned, note_batch, peek_target, prediction_of
from .finite_updates import FiniteUpdates, checks_on_device
from .outcome import UNCOMMITTED, NonFiniteError, UpdateOutcome
from .precision import leave_update
from .recompute import Recompute, SkippedUpdates, map_carry
from .window import Window, WindowGradients

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

    from .canonical_sum import CanonicalSum
    from .keys import RandomKeys
    from .pass_agreement import PassAgreement
    from .phases import Phases
    from .schedule import Schedule
    from .session import TrainingSession

logger = logging.getLogger("danling")

RunWindow = Callable[[BatchSource, Iterator[Batch], list[Batch]], bool]
"""Runs forward and backward of one update; see `UpdateStep.run_window`."""


class UpdateStep:
    """Makes updates: `run_window` runs the micro-batches of one, `make` closes the window and decides.

    Whatever counts updates advances if the update is made, and does not if it is skipped. All methods are called on all ranks, unless
    they say otherwise.

    `danling.runners.parts` makes it, with the other parts that it is given, when the model of the runner is prepared.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        data: RunData,
        loss: BatchLoss,
        *,
        losses: Meters,
        metrics: TrainMetrics | None,
        schedule: Schedule,
        phases: Phases | None,
        agreement: PassAgreement,
        canonical: CanonicalSum | None,
        recompute: Recompute,
        skipped: SkippedUpdates,
    ) -> None:
        placement, spread = runner.placement, runner.config.audit.gradient_spread
        self._runner = runner
        self._session = session
        self._keys = keys
        self._data = data
        self._loss = loss
        self.losses = losses
        self.metrics = metrics
        self.schedule = schedule
        self._phases = phases
        self._agreement = agreement
        self.canonical = canonical
        self.recompute = recompute
        self.skipped = skipped
        self.sync = StepSync(
            placement.optimizer,
            runner.device,
            reports=(placement.counts_loss, placement.counts_samples),
        )
        self.sync.extra_reductions.extend(runner.preparation.extra_reductions)
        self.finite = FiniteUpdates(self.sync)
        self.norms: GradientNorms | None = None
        if spread is not None:
            wraps = isinstance(runner.model, DistributedDataParallel)
            self.norms = GradientNorms(placement.optimizer, runner.device, spread, is_wrapped=wraps)
            self.sync.extra_reductions.append(self.norms)
        if self.canonical is not None:
            self.sync.extra_reductions.append(self.canonical)
        self.keeps_batches = False
        """Whether a batch that was changed in place is refused, since its micro-batch may be run again."""
        self.batch_changes: list[Callable[[Any], Any]] = []
        """Return the data of a micro-batch as it is trained on: a check of layouts casts it."""
        self.split = ""
        """The split that is trained on."""
        self.reduces_later = data.finds_micro_batch_size
        """Whether gradients are reduced over the ranks after the last backward, and not within it."""
        self.log_every = 1024
        """Updates between two lines of the log."""
        self.rates: list[float | None] = []
        """The learning rates of the last update of which a line is logged."""
        self.move_source: Callable[[], None] | None = None
        """What moves the position of the data past the batches of the open update; `None` in a loop by hand."""
        self._run_step: Callable[[Callable[[Any], Any], Any], Any] = runner._run_train_step
        if not runner._overrides_any("_run_train_step"):
            # That of `TorchRunner` calls its argument. So does this, which is written in C, with one call less.
            self._run_step = call
        own_step = is_overridden(runner, "train_step") or "train_step" in vars(runner)
        # With several optimizers, `optimizing` enters the context of each.
        if own_step and phases is None:
            self._run_step = partial(self._run_own_step, self._run_step)
        self._own_backward = is_overridden(runner, "backward")
        self.moves_batches = True
        """Whether `to_device` does something."""
        self._gradients: WindowGradients | None = None
        """Checks that `train_step` has left the gradients of the open window in place."""
        self._samples_on_device: Tensor | None = None
        self._has_warned_of_open = False
        self._given: list[Batch] = []
        """The micro-batches of the open window."""
        self._begun_at = 0
        """Micro-batches of the run when the open window began."""

    # Forward and backward

    def run_window(
        self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]
    ) -> bool:
        """Run forward and backward of one update; the last micro-batch, which reduces the gradient, is known when it is run."""
        runner, window = self._runner, self._runner.window
        size, agreement = self._data.accum_steps(), self._agreement
        run: Callable[[Batch, Callable[[Any], object]], object] = self.run
        if self.canonical is not None:
            run = partial(self.canonical.run, self)
        batch = next(batches, None)
        while batch is not None:
            consumed.append(batch)
            # Loaders of the library say where a window ends, also in a last one that is shorter; others are counted.
            closes = len(consumed) == size if batch.closes is None else batch.closes
            upcoming = None if closes else next(batches, None)
            if (
                not closes
                and agreement.collective_forward
                and not agreement.all_have(source, upcoming, taken=len(consumed))
            ):
                upcoming = None
            window.reduces = upcoming is None and not self.reduces_later
            run(batch, runner.train_step)
            batch = upcoming
        return True

    def run_window_that_fits(
        self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]
    ) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come.

        Forward and backward must not communicate: a rank that ran out would leave the others waiting. Afterwards the ranks agree in one
        collective whether one of them did; nothing has been updated then.
        """
        runner = self._runner
        size = source.loader.held_at_once if isinstance(source.loader, DataLoader) else 0
        if size == 0:
            return self.run_window(source, batches, consumed)
        # A rank that runs out of memory leaves the update. So the collectives that a forward or a first update makes are made before it.
        if runner.preparation.broadcasts_buffers:
            runner.broadcast_buffers()
        if runner.window.agreed_reference is None and runner.placement.optimizer.size > 1:
            runner.window.agreed_reference = float(size)
        if size == 1:
            # Nothing is left to halve: the user gets the error with its traceback.
            return self.run_window(source, batches, consumed)
        # For each update, since any of them may be the first that does not fit, as with the longest sequence.
        take_back = self.recompute.remember()
        failed = False
        try:
            self.run_window(source, batches, consumed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        # Not in the `except` block: the traceback would keep the tensors of the forward alive.
        failures = runner.placement.optimizer.all_reduce(
            torch.tensor(float(failed), dtype=torch.float64), "max"
        )
        if not failures.item():
            return True
        take_back()
        # The error and its frames refer to each other: only the collector drops the tensors that they hold.
        gc.collect()
        free_unused_memory(runner.device)
        runner.state.elastic.micro_batch_size = size // 2
        self._data.limit_micro_batch(size // 2)
        if runner.is_main_process:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                runner.state.train.global_step + 1,
                size,
                size // 2,
                size // 2,
            )
        return False

    def run(self, batch: Batch, step: Callable[[Any], object]) -> object:
        """Run forward and backward of a micro-batch of the open window, and return what its step returned."""
        runner, session = self._runner, self._session
        window, observers = runner.window, session.observers
        if window.count == 0:
            runner.reduction.begin()
            self._gradients = None
            # Still set if the replica groups have not committed the update before.
            self.move_source = None
            self._given = []
            self._begun_at = runner.state.train.micro_step
            self._keys.has_stepped = False
            self.schedule.begin_update()
            if (begins := observers.calls.get("update_started")) is not None:
                begins()
        self._given.append(batch)
        if self.keeps_batches:
            self.recompute.check(batch.data)
        self._keys.begin_micro_batch(batch.data, batch.place, window.count)
        data = runner.to_device(batch.data) if self.moves_batches else batch.data
        for change in self.batch_changes:
            data = change(data)
        weight, samples = self._loss.weigh(batch, data, training=True)
        window.begin_microbatch(weight, samples)
        may_skip = self.skipped.may_skip or window.weighs_nothing
        # After the batch was read and moved, which a skipped update does not take back, and before the step.
        if may_skip and window.count == 1 and data is not PLACEHOLDER:
            self.skipped.begin()
        # Padding has no samples.
        observed = batch.samples != 0
        if observed and (begins := observers.calls.get("micro_batch_started")) is not None:
            begins(data, read=batch.data, samples=samples)
        session.in_step = True
        try:
            if window.weighs_nothing:
                with self._cut_forward():
                    returned = self._run_step(step, data)
            else:
                returned = self._run_step(step, data)
            if self.metrics is not None:
                self._measure(self.metrics, returned, data, samples)
        except Exception as error:
            note_batch(error, "train_step", self.split, data)
            raise
        finally:
            session.in_step = False
            if observed and "micro_batch_ended" in observers.heard:
                observers.notify("micro_batch_ended")
        # Else the next backward would run through the graph of this micro-batch, which is freed.
        if runner.carry is not None:
            runner.carry = map_carry(runner.carry, Tensor.detach)
        if self.skipped.before is not None:
            self.skipped.look()
        runner.state.train.micro_step += 1
        return returned

    def _run_own_step(
        self,
        run: Callable[[Callable[[Any], Any], Any], Any],
        step: Callable[[Any], Any],
        data: Any,
    ) -> Any:
        """Call a `train_step` of the program's, which need not enter `train_context` itself.

        DistributedDataParallel decides in the forward whether the backward reduces. Without the context each micro-batch would, and ranks
        with different numbers of them would meet in the wrong reductions.
        """
        reduction, window = self._runner.reduction, self._runner.window
        with reduction.communication(last=window.reduces):
            return run(step, data)

    @contextmanager
    def _cut_forward(self) -> Iterator[None]:
        """Set the gradient of a micro-batch that weighs nothing to zero at the output of the model, whatever computes the loss from it.

        That is the output of the outermost call of a module. Where ranks share samples, as in a mesh, it is that of the whole model only:
        gradients from other ranks may arrive at the modules within it.
        """
        runner, depth = self._runner, 0
        own_data = runner.placement.data_replicas == runner.placement.optimizer.size
        modules = list(_uncompiled(runner.model)) if own_data else [runner.model]

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1

        def leave(module: nn.Module, given: object, output: object) -> None:
            nonlocal depth
            depth -= 1
            # With several optimizers, each block has its own weight, which is set only within the block.
            if depth == 0 and (self._phases is None or self._phases.current is not None):
                runner.window.cut(output)

        handles: list[Any] = []
        # The schedule of a pipeline computes the loss of one part of the batch after the other, and sets the gradient of each itself.
        if not runner.preparation.in_pipeline:
            handles += [module.register_forward_pre_hook(enter) for module in modules]
            handles += [module.register_forward_hook(leave, always_call=True) for module in modules]
            # The loss reaches the weights of the criterion without passing the output of the model.
            if self._phases is None and isinstance(runner.criterion, nn.Module):
                handles += [
                    parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                    for parameter in runner.criterion.parameters()
                    if parameter.requires_grad
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _measure(self, metrics: TrainMetrics, returned: Any, data: object, samples: float) -> None:
        check_returned(returned, "train_step")
        if returned[0] is None:
            return  # another stage of a pipeline has it
        pred = prediction_of(returned[0])
        with torch.no_grad():
            pred = whole(pred.detach()) if isinstance(pred, Tensor) else pred
            metrics.update(pred, peek_target(data), self._loss.count(data, samples))

    def back_propagate(self, scaled: Tensor) -> None:
        """Add the gradient of a scaled loss to the gradients of the window, which `train_step` must have left in place."""
        runner, window = self._runner, self._runner.window
        if self._gradients is not None:
            self._gradients.check(runner.named_parameters(), window.count)
        runner.reduction.backward(scaled, last=window.reduces)
        is_last = window.reduces or self._phases is not None
        if is_last or not self._session.in_step or not runner.reduction.keeps_gradients:
            return
        # Not in a pipeline, which adds to the gradients later, nor in a window that has weighed nothing so far, whose gradients are zero.
        weighs = isinstance(window.weight, Tensor) or window.weight != 0.0
        if weighs and not runner.preparation.in_pipeline:
            self._gradients = WindowGradients(runner.reduction.kept_parameters)

    # The update

    def make(self) -> UpdateOutcome:
        """Close the window: agree on its weight and whether it is finite, scale the gradient, decide the update, apply it, count it."""
        runner, window, session = self._runner, self._runner.window, self._session
        if window.count == 0 and not session.running:
            window.check_open()
        if window.unscaled and not self._own_backward:
            raise ValueError(
                f"Expected `train_step` to call `self.backward(loss)` for every micro-batch. Received: {window.unscaled} of {window.count} "
                "without. Call self.backward(loss) before you return; a loss that is only returned, or `loss.backward()`, is not weighed."
            )
        # Before and after the optimizer's step, so that the error names the hook that has advanced the schedule.
        self.schedule.check("`train_step`")
        self._gradients = None
        of_phases = self._phases.close(self) if self._phases is not None else None
        outcome, requests = of_phases or self.decide()
        self.schedule.check("`optimizer_step`")
        self._given = []
        # An update that replica groups make again is taken back by their member, with more than a skipped one.
        if self.skipped.remembers:
            self.skipped.end(put_back=not outcome.committed and outcome.reason != UNCOMMITTED)
        if outcome.reason == UNCOMMITTED:
            # The update is made again with the same batches, and the requests with it.
            session.request(*requests)
            return outcome
        self._conclude(
            outcome,
            steps_schedule=of_phases is None or not isinstance(runner.scheduler, JointScheduler),
        )
        # Here and not after `step`, since an override of it may save.
        self.end_batches()
        if requests:
            session.apply_requests(requests)
        session.concluded = outcome
        return outcome

    def end_batches(self) -> None:
        """Move the position of the data past the batches of the update, once."""
        advance, self.move_source = self.move_source, None
        if advance is not None:
            advance()

    def leave_open(self) -> None:
        """Leave an update that an exception has ended half-way: its samples are trained on again. Called where a training begins."""
        runner, window = self._runner, self._runner.window
        if window.count == 0:
            return
        is_put_back = self.skipped.remembers
        if is_put_back:
            self.skipped.end(put_back=True)
        if self._phases is not None:
            self._phases.leave_open()
        if self.canonical is not None:
            self.canonical.drop()
        leave_update(runner.reduction.scaler)
        runner.reduction.drop_open()
        runner.zero_gradients()
        window.reset()
        self._given, self._gradients, self.move_source = [], None, None
        runner.state.train.micro_step = self._begun_at
        if runner.is_main_process:
            logger.warning(
                "Update %d was left half-way, and is made again from its first sample. Its gradient is dropped. What else it has changed, "
                "such as buffers, meters and attributes, %s.%s To continue exactly, construct the runner again with auto_resume=true.",
                runner.state.train.global_step + 1,
                "is put back as after a skipped update" if is_put_back else "stays",
                " Its optimizer has stepped already: the weights move a second time."
                if self._keys.has_stepped
                else "",
            )

    def warn_of_open(self) -> None:
        """Name once that the state of the run is read within an update."""
        runner = self._runner
        if self._has_warned_of_open or not (self._session.in_step or runner.window.count):
            return
        self._has_warned_of_open = True
        if runner.is_main_process:
            logger.warning(
                "The state of the run was read within update %d, whose gradient it lacks: a run that continues from it makes the update "
                "again, from buffers, meters and attributes as they are now. All ranks continue with the buffers of the first one. Save "
                "between updates: in `step` after super().step(), or in `update_ended` of an observer. Others like it are not logged.",
                runner.state.train.global_step + 1,
            )

    def drop_open(self) -> None:
        """Forget what is under way between the ranks, since one of them has ended. No communication."""
        self.move_source = None
        self.sync.drop_pending()
        if self.norms is not None:
            self.norms.drop_pending()
        if self.canonical is not None:
            self.canonical.drop()
        self._session.in_step = self._session.in_update = False

    def sum_window(self, window: Window) -> StepTotals:
        """Return the sums of a window over all ranks: the one collective of an update."""
        requests = self._session.local_requests()
        try:
            return self.sync.reduce(
                StepTotals(window.weight, window.loss, window.samples, window.nonfinite, requests)
            )
        except MembershipChanged:
            self._session.request(*requests)  # no other rank has received them
            raise

    def decide(self) -> tuple[UpdateOutcome, frozenset[str]]:
        """Make or skip the update of the open window, and drop its gradient; return what the ranks have asked for, too."""
        runner, window, session = self._runner, self._runner.window, self._session
        # Before the collective: a rank whose backward has not reduced all would meet the others in the wrong one.
        if runner.placement.optimizer.size > 1:
            runner.reduction.check_backward()
        totals = self.sum_window(window)
        runner.complete_gradients()
        step = runner.state.train.global_step + 1
        agreed = runner.reduction.agree(totals)
        # Only replica groups return none: nothing of this update lasts, so nothing is unscaled, counted or dropped.
        if agreed is None:
            return UpdateOutcome(False, 0.0, 0.0, 0.0, None, UNCOMMITTED), totals.requests
        gradients = runner.unscale_gradients(agreed)
        if (
            not gradients
            and self._own_backward
            and runner.reduction.parameters
            and float(agreed.weight)
        ):
            raise ValueError(
                "Expected `backward` to leave a gradient on the parameters. Received: none on any. Call super().backward(loss) in it, or "
                "loss.backward()."
            )
        grad_norm = runner.gradient_norm(gradients)
        if type(grad_norm) is not Tensor:
            # That of torch, over shards, is this rank's term.
            grad_norm = whole(grad_norm)
        if "gradients_ready" in session.observers.heard:
            session.observers.notify("gradients_ready", agreed, grad_norm)
        reason = self._reason_to_skip(agreed, grad_norm, step)
        if reason is None:
            window.is_first = False
            # Before `clip_gradients`, where a program may add noise to the gradient.
            self._keys.begin_update()
            runner.clip_gradients(grad_norm)
            # Tells this step from one that `train_step` makes, which is refused.
            self._keys.in_update = True
            try:
                runner.optimizer_step()
            finally:
                self._keys.in_update = False
        runner.zero_gradients()
        # After the step or the skip, as in a loop by hand: an overflow lowers the scale.
        scaler = runner.reduction.scaler
        if scaler is not None and reason != "weightless":
            scaler.update()
        elif scaler is not None and isinstance(agreed.weight, Tensor):
            # It has looked at a gradient of zero, which shows nothing about its scale: keep the scale.
            scaler.update(scaler.get_scale())
        window.reset()
        outcome = UpdateOutcome(
            reason is None, agreed.weight, agreed.loss, agreed.samples, grad_norm, reason
        )
        return outcome, agreed.requests

    def _reason_to_skip(self, totals: StepTotals, grad_norm: Tensor, step: int) -> str | None:
        """Return why the update must not be made, `None` if it is made.

        On the CPU the result of the check is available at once. On an accelerator, a run that may not skip updates does not wait for the
        device: it reads the result one update later, and before anything is evaluated or saved. One that may skip updates waits once.
        """
        runner, window = self._runner, self._runner.window
        if isinstance(totals.weight, float) and totals.weight == 0.0:
            return "weightless"
        if window.on_host:
            finite = not totals.nonfinite and math.isfinite(grad_norm.item())
        else:
            checks = checks_on_device(totals, grad_norm)
            if not self.skipped.may_skip:
                self.finite.check_before(step)
                self.finite.note(step, checks, window.nonfinite, self._given_batches())
                return None
            # The second check is there where only the device knows the weight.
            finite, *weighs = checks.tolist()
            if weighs == [False]:
                return "weightless"
        if finite:
            return None
        if runner.reduction.scaler is not None:
            return "overflow"
        if runner.config.skip_nonfinite_grad:
            bad_sample = self._given_batches().bad_sample()
            if bad_sample:
                logger.warning("The data of update %d has %s.", step, bad_sample)
            return "nonfinite"
        # The host has waited for the check, so the gradient is still there and its parameters can be named.
        gradients = [
            name
            for name, g in runner.reduction.named_gradients()
            if not local_part(g).isfinite().all()
        ]
        raise self.finite.error(step, window.nonfinite, gradients[:5], self._given_batches())

    def _given_batches(self) -> GivenBatches:
        source = self._runner.sources.get(self.split)
        if source is None:
            return GivenBatches(self._given, None, 0)
        if source.kind == "window":
            # A stream may reuse the memory of its batches.
            return GivenBatches([], source, source.epoch)
        return GivenBatches(self._given, source, source.epoch)

    def _conclude(self, outcome: UpdateOutcome, *, steps_schedule: bool) -> None:
        """Advance everything that moves with an update, or nothing."""
        runner, train = self._runner, self._runner.state.train
        # A skipped update counts here too, since it has read its samples.
        if not isinstance(outcome.samples, Tensor):
            train.samples += int(outcome.samples)
        else:
            # Read when a line is logged or a checkpoint is made; every update would wait for the device.
            counted = self._samples_on_device
            self._samples_on_device = (
                outcome.samples if counted is None else counted + outcome.samples
            )
        if outcome.committed:
            train.global_step += 1
            train.consecutive_skips = 0
            if train.global_step % self.log_every == 0:
                # The rates of this update: the schedule advances next.
                self.rates = rates_of(runner.optimizer)
            self.schedule.after_update(advances=steps_schedule)
            if runner.ema is not None:
                runner.preparation.update_averages(runner.ema, runner.unwrapped_model)
            self.losses.add_totals("loss", outcome.loss_sum, outcome.weight)
            norms = self.norms
            if norms is not None and norms.domain.size > 1 and outcome.grad_norm is not None:
                norms.note(train.global_step, outcome.grad_norm)
            return
        train.skipped_updates += 1
        train.consecutive_skips += 1
        self.warn_of_skip("", train.consecutive_skips, outcome.reason)

    def warn_of_skip(self, whose: str, skips: int, reason: str | None) -> None:
        """Log a skipped update, and end the training after too many in a row. `whose` is text that names one of several optimizers."""
        step = self._runner.state.train.global_step + 1
        limit = self._runner.config.max_skipped_updates
        logger.warning("Update %d%s was skipped (%s).", step, whose, reason)
        if limit is not None and skips > limit:
            raise NonFiniteError(
                f"Expected at most {limit} skipped updates in a row. Received: {skips}{whose} before step {step} (the last one: {reason}). "
                "Look at the data and the learning rate, or raise max_skipped_updates."
            )

    # What an accelerator has not reported yet

    def read_samples(self) -> None:
        """Add the samples that were counted on the device to the counter. May be called on one rank."""
        counted, self._samples_on_device = self._samples_on_device, None
        if counted is not None:
            self._runner.state.train.samples += int(counted)

    def raise_pending_error(self) -> None:
        """Wait for the checks of the updates that an accelerator has made, and raise their error. Called before a save or an evaluation."""
        self.read_samples()
        self.check_updates_made()
        self._session.observers.notify("results_needed")

    def check_updates_made(self) -> None:
        """Raise the error of updates that are made and not checked yet, before their weights are read. Called on all ranks."""
        self.finite.check_before(None)
        if self.norms is not None:
            self.norms.settle()


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those within it, but none that is compiled, whose graph a hook would become part of."""
    if getattr(module, "_compiled_call_impl", None) is None:
        yield module
        for child in module.children():
            yield from _uncompiled(child)
