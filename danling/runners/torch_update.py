"""One update of a torch runner, read from top to bottom, and the one place that decides whether it is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.config import RunnerConfig
from danling.distributed import StepTotals
from danling.torchft import Healing, ReplicaGroups, ReplicaMember, ReplicaSettings, position_owner
from danling.training import (
    UNCOMMITTED,
    DDPReduction,
    GradientReduction,
    LocalReduction,
    UpdateOutcome,
    call_model,
    is_pair,
    ungraded,
    unpack_batch,
)
from danling.training.coverage import ungraded_names
from danling.training.decision import UpdateDecision
from danling.training.gradients import normalization_statistics
from danling.training.outcome import count_skip, no_gradient
from danling.training.rollback import buffers_of, remember_forwards

from .torch_evaluation import TorchEvaluation

logger = logging.getLogger("danling")


class TorchUpdate(TorchEvaluation):
    """Forward, backward, decision and everything that advances with an update."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        # First of all: what an update left to be checked must not be saved.
        self.saver.before.insert(0, lambda: self.raise_pending_error())
        self._samples_on_device: Tensor | None = None
        self._log_every = 1024
        self._steps_scheduler = False
        self._rates: list[float] = []
        """Learning rates of the update that is logged next: those it was made with."""

    def prepare_updates(self) -> None:
        """Read once what every update needs to know; the loops call it, and `train_step` where it is called alone. Called on all ranks.

        Raises:
            ValueError: If there is no optimizer, or updates are agreed on with other replica groups, which only the loops do.
        """
        self.check_optimizer_given()
        if self._session.running:
            return
        if self.fault_tolerance is not None:
            raise ValueError(
                "Expected a loop around `train_step` with ft.enabled, which agrees on each update with the other replica groups. Received: "
                "a call of `train_step` alone. Call `train_epoch(split)` or `train()`."
            )
        if self.window.count == 0:
            self.begin_updates()

    def begin_updates(self) -> None:
        """Look at model, criterion, optimizer and scheduler as they are now. Called on all ranks."""
        self.bind_reduction()
        if self.fault_tolerance is not None:
            self.fault_tolerance.begin_training()
        self.window.reduces = True
        self.window.sum_reduced = self.sums_loss
        self._log_every = self.log_interval
        self._steps_scheduler = self.scheduler is not None and self.scheduler_interval() == "step"
        if not self.model.training:
            self.model.train()

    def check_optimizer_given(self) -> None:
        """Refuse to train without an optimizer. No communication: may be called on one rank.

        Raises:
            ValueError: If there is none.
        """
        if self.optimizer is None:
            built = "`build_optimizer` returned none. " if self._overrides("build_optimizer") else ""
            raise ValueError(
                f"Expected an optimizer. Received: optimizer=None. {built}Assign `self.optimizer` in __init__, or set `optim.type`."
            )

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Run one micro-batch forward and backward. Called on all ranks, `accum_steps` times an update.

        Override it for a loop of your own; call `self.backward(loss)` with the mean-reduced loss of the batch. Called alone, it is a
        micro-batch of the open window, moved and weighed as by the loops; `step()` makes the update.

        Args:
            data: The batch; within a loop it is on the device.

        Returns:
            The prediction and the loss.
        """
        inputs, target = data if is_pair(data) else unpack_batch(data, self.unwrapped_model)
        with self.train_context() or nullcontext():
            with self.forward_context() or nullcontext():
                pred = call_model(self.model, inputs)
                loss = self.compute_loss(pred, target)
            self.backward(loss)
        return pred, loss

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss of the open micro-batch with its weight. Called on all ranks.

        Args:
            loss: 0-dim, as the criterion reduced it.

        Raises:
            ValueError: If no micro-batch is open, so that nobody knows what the loss weighs.
        """
        if self.window.count == 0 and not self._session.running:
            self.window.check_open()
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ValueError(
                "Expected a loss that depends on parameters that are trained. Received: one without a gradient. Look for .detach(), "
                ".item(), torch.no_grad() or a frozen model on the way to it."
            )
        scaled = self.window.scale(loss)
        if self.precision.scaler is not None:
            scaled = self.precision.scaler.scale(scaled)
        self.reduction.backward(scaled, last=self.window.reduces)

    def step(self) -> UpdateOutcome:
        """Close the window: agree on its weight and health, mend the gradient, and decide the update. Called on all ranks.

        Returns:
            Whether it was made and why not, its weight, mean loss, samples and gradient norm; the same on all ranks.

        Raises:
            ValueError: If `train_step` left out `self.backward(loss)`.
            NonFiniteError: If loss or gradient is not finite and the update must not be skipped.
        """
        if self.reduction.optimizer is not self.optimizer:
            self.bind_reduction()
        if self.window.count == 0 and not self._session.running:
            self.window.check_open()
        self.window.end_microbatch()
        if self.window.unscaled and not self._overrides("backward"):
            self.window.check_scaled()
        totals = self.step_sync.reduce(
            weight=self.window.weight,
            loss=self.window.loss,
            samples=self.window.samples,
            nonfinite=self.window.nonfinite,
            requests=self._session.local_requests(),
        )
        self.complete_gradients()
        agreed = self.reduction.agree(totals, self.window, self.state.train.global_step + 1)
        if agreed is None:
            # To be asked again with the same batches.
            self._session.request(*totals.requests)
            return UpdateOutcome(False, 0.0, 0.0, 0.0, None, UNCOMMITTED)
        totals = agreed
        gradients = self.unscale_gradients(totals)
        if not gradients and self._overrides("backward") and self.parameters and float(totals.weight):
            raise no_gradient()
        grad_norm = self.gradient_norm(gradients)
        reason = self._decision.objection(
            totals,
            grad_norm,
            step=self.state.train.global_step + 1,
            own_nonfinite=self.window.nonfinite,
            scales=self.precision.scaler is not None,
            may_skip=self.config.skip_nonfinite_grad,
            named=self.reduction.nonfinite,
        )
        if reason is None:
            if not self._looked:
                self._look_at_first_update()
            self.clip_gradients(grad_norm)
            self.optimizer_step()
        outcome = UpdateOutcome(reason is None, totals.weight, totals.loss, totals.samples, grad_norm, reason)
        self._conclude(outcome)
        if totals.requests:
            self._session.apply_requests(totals.requests)
        return outcome

    _looked: bool = False
    """Whether the gradients of the first update were looked at."""

    def _look_at_first_update(self) -> None:
        """Name what is trained and got no gradient, and let all ranks weigh alike where a model returns its loss."""
        self._looked = True
        mine = self.reduction.without_gradient({id(parameter) for parameter in self.optimized_parameters()})
        trained = (name for name, parameter in self.named_parameters() if parameter.requires_grad)
        names = ungraded_names(mine, trained, self.world)
        if names and self.is_main_process:
            logger.warning("%s", ungraded(names))
        self._batch_loss.agree(self.world.gather_objects)

    # Replica groups

    def init_fault_tolerance(self) -> None:
        """Join the replica groups when `config.ft.enabled`. Called on all ranks of the group.

        Raises:
            ValueError: If no lighthouse is named.
            ImportError: If torchft is not installed.
            QuorumError: If the lighthouse cannot be reached.
        """
        if not self.config.ft.enabled:
            return
        member = self.fault_tolerance = self._join_replica_groups()
        self._closers.callback(member.close)
        # Every forward waits for the other groups.
        self.preparation.communication = "ft.enabled=True"
        self.run_state.add_progress(member.progress_part())
        self.saver.writes = member.writes
        # As a save does, so that all groups go on alike.
        self.saver.instead.append(lambda: self.broadcast_buffers())

    def _join_replica_groups(self) -> ReplicaMember:
        healing = Healing(
            run_state=self.run_state,
            counters=lambda: self.state,
            sources=lambda: self.sources.among(self.train_splits),
            keeps_positions=lambda: position_owner(self.config) is not None,
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            window=lambda: self.window,
            meters=lambda: self.meters,
            stream=lambda: (self.seed, self.placement.stream_index),
            is_main=self.is_main_process,
        )
        groups = ReplicaGroups(
            ReplicaSettings.from_config(self.config),
            group=self.world,
            state_dict=lambda: healing.state(),
            load_state_dict=lambda state: healing.take(state),
            asked_to_stop=self._session.asked_to_stop,
        )
        return ReplicaMember(
            groups,
            healing,
            world=self.world,
            copies=lambda: self.preparation.copies(
                self.model, self.ema.weights.values() if self.ema is not None else ()
            ),
            remember=self._remember_update,
            statistics=lambda: normalization_statistics(self.unwrapped_model),
            resumes=lambda: bool(self.config.auto_resume),
            checkpoints=lambda: self.checkpoint_manager,
            directory=lambda: self.workspace.checkpoints,
            step=lambda: self.state.train.global_step,
            tried=lambda: self.state.train.global_step + self.state.train.skipped_updates,
            load=lambda source: self.load_checkpoint(source),
        )

    def _remember_update(self) -> Callable[[], None]:
        put_back = self._remember_forwards()

        def take_back() -> None:
            self.optimizer.zero_grad()
            self.window.reset()
            put_back()

        return take_back

    def _remember_forwards(self) -> Callable[[], None]:
        return remember_forwards(
            self.device,
            counter=self.state.train,
            meters=self.meters,
            buffers=lambda: buffers_of(self.unwrapped_model, self._criterion_tensors("buffers")),
        )

    # The gradient: what a stack does otherwise stands in its reduction

    @cached_property
    def reduction(self) -> GradientReduction:
        """What completes, measures, clips and applies the gradient; looked for anew when training begins, and in each pass."""
        return self._chosen_reduction()

    def bind_reduction(self) -> None:
        """Look at model and optimizer as they are now: parameters may have been frozen, or a group added."""
        self.rewrap_if_trainables_changed()
        self.reduction = self._chosen_reduction()

    def _chosen_reduction(self) -> GradientReduction:
        self.check_optimizer_given()
        reduction = self.build_reduction()
        return reduction if self.fault_tolerance is None else self.fault_tolerance.around(reduction)

    def build_reduction(self) -> GradientReduction:
        """Return what completes, measures, clips and applies the gradient; a stack of your own overrides this."""
        if not isinstance(self.model, DistributedDataParallel):
            return LocalReduction(self.optimizer, self.named_parameters, self.precision.scaler)
        return DDPReduction(
            self.optimizer,
            self.named_parameters,
            self.precision.scaler,
            model=self.model,
            domain=self.data_domain,
            # DistributedDataParallel has reduced nothing where memory may run out in the backward, and never the criterion's.
            unreduced=lambda: (
                self._criterion_tensors("parameters")
                if self.memory_retry is None
                else [parameter for _, parameter in self.named_parameters()]
            ),
        )

    def train_context(self) -> Any:
        """Return the context of the forward and backward of one micro-batch; gradients are reduced on the last one only."""
        return self.reduction.context(last=self.window.reduces)

    def complete_gradients(self) -> None:
        """Finish the reduction of the gradients over the ranks, where the backward has not."""
        self.reduction.complete()

    def unscale_gradients(self, totals: StepTotals) -> list[Tensor]:
        """Divide the accumulated gradient by the global weight of the window, and by the scale of float16.

        Args:
            totals: What the ranks agreed on for the window.

        Returns:
            What this rank holds of the gradients that exist.
        """
        reduction = self.reduction
        return reduction.unscale(self.window.gradient_factor(totals.weight, reduction.mean_over), totals.weight)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates; groups may be added while training goes on."""
        return self.reduction.parameters

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks of the optimizer domain.

        Args:
            gradients: What this rank holds of the gradient, unscaled.
        """
        return self.reduction.norm(gradients)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Clip by `max_grad_norm`, then by `max_grad_value`. Called on all ranks.

        Args:
            grad_norm: 2-norm of the whole gradient, 0-dim.
        """
        self.reduction.clip(grad_norm, self.config.max_grad_norm, self.config.max_grad_value)

    @cached_property
    def _decision(self) -> UpdateDecision:
        return UpdateDecision(self.placement.optimizer, self.device)

    def raise_pending_error(self) -> None:
        """Raise now what an update on an accelerator left to be checked. Called before anything is saved or evaluated.

        Called on all ranks.
        """
        self.read_samples()
        self._decision.raise_pending()

    def read_samples(self) -> None:
        """Bring the counter of samples up to date with what is counted on the device. May be called on one rank."""
        counted, self._samples_on_device = self._samples_on_device, None
        if counted is not None:
            self.state.train.samples += int(counted)

    def optimizer_step(self) -> None:
        """Apply a committed update to the weights, with the gradient as it is. Called on all ranks.

        Raises:
            ValueError: If there is no optimizer; in float16, if it is called alone, since `step` takes the scale out of the gradient.
        """
        if self.reduction.optimizer is not self.optimizer:
            self.reduction = self._chosen_reduction()
        if self.precision.scaler is not None and not self._session.running:
            self.window.check_open()
        self.reduction.apply(self.state.train.global_step + 1)

    def zero_gradients(self) -> None:
        """Drop the gradient of the window, whether it was applied or not.

        Called on all ranks.
        """
        self.reduction.zero()

    def _conclude(self, outcome: UpdateOutcome) -> None:
        """Advance everything that moves with an update, or nothing."""
        self.zero_gradients()
        train = self.state.train
        if self.precision.scaler is not None and outcome.reason != "weightless":
            self.precision.scaler.update()
        if not isinstance(outcome.samples, Tensor):
            train.samples += int(outcome.samples)
        else:
            # Read when a line is logged or a checkpoint is made; every update would wait for the device.
            counted = self._samples_on_device
            self._samples_on_device = outcome.samples if counted is None else counted + outcome.samples
        if outcome.committed:
            train.global_step += 1
            train.consecutive_skips = 0
            if train.global_step % self._log_every == 0:
                self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            if self.scheduler is not None and self._steps_scheduler:
                self.scheduler.step()
            if self.ema is not None:
                self.preparation.update_averages(self.ema, self.unwrapped_model)
            self.losses.add_totals("loss", outcome.loss_sum, outcome.weight)
        else:
            count_skip(train, outcome.reason, limit=self.config.max_skipped_updates)
        self.window.reset()
