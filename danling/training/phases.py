"""Several optimizers that are stepped one after the other within one `train_step`: each phase is its own update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.data.run_data import RunData
from danling.optim import JointOptimizer

from .outcome import UpdateOutcome
from .precision import leave_update
from .reduction import GradientReduction
from .session import TrainingSession
from .update import UpdateStep
from .window import Window

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class PhasedModel(DistributedDataParallel):
    """A model whose phases average their gradients themselves: attributes and calls go to the module.

    The wrapper makes the weights of all ranks equal and marks the model as copied. Its own reduction, which takes one forward and one
    backward of everything, is not used.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def __getitem__(self, name: object) -> Any:
        return self.module[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before the wrapper is complete there is no module, and looking for it here would not end.
            if name == "module":
                raise
            return getattr(self.module, name)


class Phase:
    """One optimizer of several: its window, its reduction and scaler, and the gradient of its micro-batches so far."""

    def __init__(self, name: str, optimizer: Optimizer, runner: TorchRunner) -> None:
        self.name = name
        self.optimizer = optimizer
        self.window = Window(runner.placement.optimizer, runner.device)
        self.window.is_first = False
        self.scaler = runner.precision.new_scaler()
        self.reduction: GradientReduction
        self.outcome: UpdateOutcome | None = None
        self.is_due = True
        self.is_reached = False
        self.every = 0
        """What `optimizing` was called with last; 0 before it was."""
        self.skips = 0
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        """The gradient so far, set aside so that no other phase adds to it."""


class Phases:
    """The phases of a runner whose `optimizer` is a mapping.

    Within a phase, `runner.window` and `runner.reduction` are those of the phase, so that `backward` and the hooks of an update work on
    it. The update of a phase is made at the end of its block in the last micro-batch of a window. `step` then closes the window.
    """

    def __init__(
        self, runner: TorchRunner, optimizer: JointOptimizer, session: TrainingSession
    ) -> None:
        self._runner = runner
        self._session = session
        self._phases = {
            name: Phase(name, member, runner) for name, member in optimizer.named.items()
        }
        self.current: Phase | None = None
        self._used: list[Phase] = []
        self._requests: frozenset[str] = frozenset()
        self._has_plain_loss = False

    def bind(self) -> None:
        """Make the reductions for the present model. Called on all ranks, between updates."""
        runner = self._runner
        joint, scaler = runner.optimizer, runner.precision.scaler
        # A reduction takes optimizer and scaler from the runner, also that of a stack of the user's.
        try:
            for phase in self._phases.values():
                runner.optimizer, runner.precision.scaler = phase.optimizer, phase.scaler
                phase.every = 0  # a training may be longer than the one before
                phase.reduction = runner.build_reduction()
        finally:
            runner.optimizer, runner.precision.scaler = joint, scaler

    @contextmanager
    def optimizing(
        self, update: UpdateStep, name: str, *, every: int, weight: float | Tensor | None
    ) -> Iterator[bool]:
        """See `TorchRunner.optimizing`."""
        runner, window = self._runner, self._runner.window
        phase = self._checked(name, every)
        if (
            not self._used
            and isinstance(runner.model, PhasedModel)
            and runner.model.broadcast_buffers
        ):
            runner.broadcast_buffers()
        # Once for an update, though each of its micro-batches has the block.
        if phase not in self._used:
            self._used.append(phase)
        if phase.every != every:
            phase.every = every
            update.schedule.check_length_of(name, every)
        phase.is_due = (runner.state.train.attempted + 1) % every == 0
        # The loss of this micro-batch belongs to the window of the phase, which weighs it.
        window.expect_no_loss()
        phase.window.agreed_reference = window.agreed_reference
        phase.window.sum_reduced = window.sum_reduced
        phase.window.may_divide_by_zero = window.may_divide_by_zero
        if phase.is_due:
            # The gradient of this phase so far: the blocks between were those of other optimizers.
            for parameter, gradient in phase.gradients:
                parameter.grad = gradient
            phase.gradients = []
            if weight is None:
                weight = window.current
            phase.window.begin_microbatch(weight, window.current_samples)
        whole, self.current = runner.reduction, phase
        runner.window, runner.reduction = phase.window, phase.reduction
        try:
            # Each backward reduces: a gradient that FSDP2 adds up by itself could not be set aside.
            with runner.train_context():
                yield phase.is_due
            if phase.is_due:
                self._end(phase, update, last=window.reduces)
        finally:
            self.current = None
            runner.window, runner.reduction = window, whole

    def _checked(self, name: str, every: int) -> Phase:
        if not isinstance(name, str) or name not in self._phases:
            raise ValueError(
                f"Expected the name of an optimizer, one of {', '.join(self._phases)}. Received: optimizing({name!r})."
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"Expected every to be at least 1, an integer. Received: optimizing({name!r}, every={every!r})."
            )
        if self.current is not None or not self._session.in_step:
            where = (
                f"inside of optimizing({self.current.name!r})"
                if self.current
                else "outside of train_step"
            )
            raise ValueError(
                f"optimizing({name!r}) was called {where}. Call it in train_step, one block after another."
            )
        if self._has_plain_loss:
            raise self._error_of_plain_loss()
        return self._phases[name]

    def takes_loss(self) -> bool:
        """Return whether a loss is back-propagated here, which it is not in a phase that is not due."""
        if self.current is None:
            self._has_plain_loss = True
            if self._used:
                raise self._error_of_plain_loss()
        return self.current is None or self.current.is_due

    def _error_of_plain_loss(self) -> ValueError:
        self._has_plain_loss = False
        return ValueError(
            "backward(loss) was called outside of optimizing(name) in a train_step that has phases. Call it inside of the block of the "
            "optimizer that the loss is for."
        )

    def _end(self, phase: Phase, update: UpdateStep, *, last: bool) -> None:
        """End a block that is due: make the update of the phase in the last micro-batch, else keep its gradient."""
        window = phase.window
        if window.unscaled:
            window.reset()
            raise ValueError(
                f"Expected the block of optimizing({phase.name!r}) to call self.backward(loss). Received: a block without. Call it there, "
                "or leave the block out; every=n makes an update in each n-th pass only."
            )
        # Set aside, since the next block may reach the same parameters.
        if not last:
            phase.gradients = [
                (parameter, parameter.grad) for parameter in phase.reduction.parameters
            ]
            phase.reduction.zero()
            return
        # Asked until it was so once: a later loss may leave out all parameters, such as one that is clipped to zero.
        if not phase.is_reached:
            phase.is_reached = any(
                parameter.grad is not None for parameter in phase.reduction.parameters
            )
            if not phase.is_reached:
                window.reset()
                raise ValueError(
                    f"Expected the loss in the block of optimizing({phase.name!r}) to depend on a parameter of that optimizer. Received: "
                    "a loss without a gradient for any. Compute it from these parameters, or name the optimizer that it is for."
                )
        phase.outcome, requests = update.decide()
        self._requests |= requests
        outcome = phase.outcome
        if outcome.committed:
            phase.skips = 0
            update.losses.add_totals(f"{phase.name}_loss", outcome.loss_sum, outcome.weight)
            update.schedule.advance_one(phase.name)
            return
        phase.skips += 1
        # Of the update the other phases may be made, whose meters count; statistics of its forwards must not stay with NaN in them.
        update.skipped.put_buffers_back()
        update.warn_of_skip(f" of the optimizer {phase.name!r}", phase.skips, outcome.reason)

    def close(self, update: UpdateStep) -> tuple[UpdateOutcome, frozenset[str]] | None:
        """Close the window: return what its phases come to together, and the requests of the ranks; `None` where it had no phases.

        The loss is the sum of the mean losses. The outcome is committed unless every phase was skipped.
        """
        used = self._used
        requests = self._requests
        self._has_plain_loss = False
        self._used = []
        self._requests = frozenset()
        if not used:
            return None
        window = self._runner.window
        made = [phase.outcome for phase in used if phase.outcome is not None]
        for phase in used:
            phase.outcome = None
        if made:
            first = made[0]
            losses = [outcome.loss for outcome in made]
            norms = [
                torch.as_tensor(outcome.grad_norm)
                for outcome in made
                if outcome.grad_norm is not None
            ]
            committed = any(outcome.committed for outcome in made)
            loss_sum = sum(losses[1:], losses[0]) * first.weight
            # Of all parameters together, as with one optimizer.
            norm = torch.stack(norms).norm() if norms else None
            reason = None if committed else first.reason
            outcome = UpdateOutcome(committed, first.weight, loss_sum, first.samples, norm, reason)
        else:  # no phase was due: the ranks agree on samples and requests all the same
            totals = update.sum_window(window)
            requests = totals.requests
            outcome = UpdateOutcome(True, totals.weight, totals.loss, totals.samples)
        window.reset()
        return outcome, requests

    def leave_open(self) -> None:
        """Forget the gradients and blocks of an update that an exception has ended."""
        self._used, self._requests, self._has_plain_loss = [], frozenset(), False
        for phase in self._phases.values():
            phase.gradients, phase.outcome = [], None
            phase.window.reset()
            leave_update(phase.scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return skips in a row and the scaler of each phase."""
        return {
            name: {
                "skips": phase.skips,
                "scaler": {} if phase.scaler is None else phase.scaler.state_dict(),
            }
            for name, phase in self._phases.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, stored in state.items():
            phase = self._phases[name]
            phase.skips = int(stored["skips"])
            if phase.scaler is not None and stored["scaler"]:
                phase.scaler.load_state_dict(stored["scaler"])


def phases_of(runner: TorchRunner, session: TrainingSession, data: RunData) -> Phases | None:
    """Return the phases of a runner whose optimizers have names, `None` for any other."""
    optimizer = runner.optimizer
    if not isinstance(optimizer, JointOptimizer) or not optimizer.named:
        return None
    # What runs micro-batches again, or has one window and one reduction for all parameters.
    config = runner.config
    refused = {
        f"stack={runner.stack!r}": runner.stack not in ("ddp", "parallel"),
        "parallel.axes.pipeline": config.parallel.axes.pipeline > 1,
        "ft.enabled=true": config.ft.enabled,
        "dataloader.micro_batch_size='auto'": data.finds_micro_batch_size,
        "gradient_sum='canonical'": config.gradient_sum == "canonical",
        "audit.replay_interval": config.audit.replay_interval is not None,
    }
    found = next((name for name, is_set in refused.items() if is_set), None)
    if found is not None:
        raise ValueError(
            "Expected a run whose micro-batches are computed once, on `ddp` or `parallel` without a pipeline, for optimizers by name. "
            f"Received: {found} with the optimizers {', '.join(optimizer.named)}. Change it, or step them together in one "
            "dl.optim.JointOptimizer(first, second)."
        )
    return Phases(runner, optimizer, session)
