"""One update, from the closed window to what advances with it: agreed on, judged, applied, counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from danling.distributed import GradientNorms, StepSync, StepTotals
from danling.metrics import Meters

from .keys import RandomKeys
from .outcome import UNCOMMITTED, UpdateDecision, UpdateOutcome, count_skip, no_gradient
from .preparation import ModelPreparation
from .session import TrainingSession
from .window import Window

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


@dataclass(frozen=True)
class Judged:
    """What was decided of an update, and done.

    Attributes:
        totals: What the ranks have agreed on.
        grad_norm: Norm of the gradient before clipping, 0-dim.
        reason: Why the update was not made; `None` where it was.
    """

    totals: StepTotals
    grad_norm: Tensor
    reason: str | None


class UpdateStep:
    """Turns a closed window into an update: everything that counts updates advances with it, or, if it is skipped, nothing does."""

    def __init__(
        self,
        run: TorchRunner,
        *,
        keys: RandomKeys,
        window: Window,
        sync: StepSync,
        norms: GradientNorms | None = None,
        session: TrainingSession,
        preparation: ModelPreparation,
        look: Callable[[], None],
        losses: Meters,
        own_backward: bool = False,
    ) -> None:
        self.window = window
        self.sync = sync
        self.norms = norms
        if norms is not None:
            sync.riders.append(norms)
        self.decision = UpdateDecision(sync.domain, sync.device)
        self.losses = losses
        self.log_every = 1024
        self.steps_scheduler = self.tells_place = False
        self.rates: list[float] = []
        self._run = run
        self._keys = keys
        self._session = session
        self._preparation = preparation
        self._look = look
        self._own_backward = own_backward
        self._samples_on_device: Tensor | None = None

    def make(self) -> UpdateOutcome:
        """Close the window: agree on its weight and whether it is finite, scale the gradient, decide the update. Called on all ranks."""
        window, session = self.window, self._session
        if window.count == 0 and not session.running:
            window.check_open()
        window.end_microbatch()
        if window.unscaled and not self._own_backward:
            window.check_scaled()
        totals = self.sync.reduce(
            weight=window.weight,
            loss=window.loss,
            samples=window.samples,
            nonfinite=window.nonfinite,
            requests=session.local_requests(),
        )
        judged = self._judged(totals)
        if judged is None:
            # The update is made again with the same batches, and the requests with it.
            session.request(*totals.requests)
            return UpdateOutcome(False, 0.0, 0.0, 0.0, None, UNCOMMITTED)
        agreed, reason = judged.totals, judged.reason
        outcome = UpdateOutcome(reason is None, agreed.weight, agreed.loss, agreed.samples, judged.grad_norm, reason)
        self._conclude(outcome)
        if outcome.committed and self.norms is not None:
            self.norms.note(self._run.state.train.global_step, judged.grad_norm)
        if agreed.requests:
            session.apply_requests(agreed.requests)
        return outcome

    def _judged(self, totals: StepTotals) -> Judged | None:
        """Complete the gradient, decide the update, and apply it; `None` where replica groups have taken it back."""
        run, window = self._run, self.window
        run.complete_gradients()
        step = run.state.train.global_step + 1
        agreed = run.reduction.agree(totals, window, step)
        if agreed is None:
            return None
        gradients = run.unscale_gradients(agreed)
        if not gradients and self._own_backward and run.reduction.parameters and float(agreed.weight):
            raise no_gradient()
        grad_norm = run.gradient_norm(gradients)
        if self._session.observers:
            self._session.observers.notify("gradients_ready", agreed, grad_norm)
        reason = self.decision.objection(
            agreed,
            grad_norm,
            step=step,
            own_nonfinite=window.nonfinite,
            scales=run.precision.scaler is not None,
            may_skip=run.config.skip_nonfinite_grad,
            named=run.reduction.nonfinite,
        )
        if reason is None:
            if window.is_first:
                window.is_first = False
                self._look()
            run.clip_gradients(grad_norm)
            with self._keys.updating():
                run.optimizer_step()
        return Judged(agreed, grad_norm, reason)

    def _conclude(self, outcome: UpdateOutcome) -> None:
        """Advance everything that moves with an update, or nothing."""
        run = self._run
        run.zero_gradients()
        train, scaler, scheduler, ema = run.state.train, run.precision.scaler, run.scheduler, run.ema
        if scaler is not None and outcome.reason != "weightless":
            scaler.update()
        if not isinstance(outcome.samples, Tensor):
            train.samples += int(outcome.samples)
        else:
            # Read when a line is logged or a checkpoint is made; every update would wait for the device.
            counted = self._samples_on_device
            self._samples_on_device = outcome.samples if counted is None else counted + outcome.samples
        if outcome.committed:
            train.global_step += 1
            train.consecutive_skips = 0
            if train.global_step % self.log_every == 0:
                self.rates = [float(group["lr"]) for group in run.optimizer.param_groups]
            if scheduler is not None and self.steps_scheduler:
                if self.tells_place:
                    scheduler.step_update(train.global_step)
                else:
                    scheduler.step()
            if ema is not None:
                self._preparation.update_averages(ema, run.unwrapped_model)
            self.losses.add_totals("loss", outcome.loss_sum, outcome.weight)
        else:
            count_skip(train, outcome.reason, limit=run.config.max_skipped_updates)
        self.window.reset()

    def read_samples(self) -> None:
        """Bring the counter of samples up to date with what is counted on the device. May be called on one rank."""
        counted, self._samples_on_device = self._samples_on_device, None
        if counted is not None:
            self._run.state.train.samples += int(counted)

    def raise_pending_error(self) -> None:
        """Raise now what an update on an accelerator left to be checked. Called before anything is saved or evaluated, on all ranks."""
        self.read_samples()
        self.decision.raise_pending()
        if self.norms is not None:
            self.norms.settle()
        if self._session.observers:
            self._session.observers.notify("results_needed")
