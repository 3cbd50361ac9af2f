"""The runner for one process or several copies of a model: construction, loops, one update, evaluation, and what is saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.checkpoints import exclude, read_model
from danling.checkpoints.pretrained import (
    DESCRIPTION,
    check_pretrained,
    describe_model,
    save_pretrained,
    write_description,
)
from danling.config import RunnerConfig
from danling.data import move_to_device
from danling.distributed import StepTotals
from danling.metrics import Meters, MetricSet
from danling.optim.building import build_optimizer, build_scheduler
from danling.optim.options import adopt_options, options_of
from danling.reporting import device_peak_flops
from danling.supervision import Profiler
from danling.torchft import ReplicaMember
from danling.training import (
    EMA,
    Compilation,
    DDPReduction,
    GradientReduction,
    LocalReduction,
    PassAgreement,
    Precision,
    UpdateOutcome,
    Window,
    call_model,
    count_tokens,
    criterion_loss,
    criterion_weight,
    is_pair,
    prediction_of,
    unpack_batch,
)
from danling.training.component_checks import check_metrics, warn_of
from danling.training.component_parts import component_parts
from danling.training.forward import EvaluationForward
from danling.training.model_states import ModelStates
from danling.training.preparation import ModelPreparation
from danling.training.readiness import check_components
from danling.training.run_state import StatePart
from danling.utils.names import canonical_name

from .assembly import TorchParts
from .base_runner import RESERVED_FIGURES, BaseRunner, Results

logger = logging.getLogger("danling")


class TorchRunner(BaseRunner):
    """Trains on one process, or on several with DistributedDataParallel.

    Subclass it, set `model`, `criterion`, `datasets` (and, if you like, `optimizer`, `scheduler`, `dataloaders`) in `__init__` after
    `super().__init__(config)`, override what you want, and call `train()`. Construct and train on all ranks.

    Examples:
        >>> class MyRunner(TorchRunner):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.model = nn.Linear(4, 2)
        ...         self.criterion = nn.CrossEntropyLoss()
        ...         self.datasets = {"train": train_set, "val": val_set}
        >>> MyRunner({"epochs": 3, "optim": {"type": "adamw"}}).train()  # doctest: +SKIP
    """

    stack = "ddp"
    compilation: Compilation | None = None
    """What was compiled; `None` unless `compile.enable`."""
    fault_tolerance: ReplicaMember | None = None
    """This process's replica group among the others; `None` unless `ft.enabled`."""

    # Made after the user's `__init__`; annotated here, as every name that a user may not take.
    precision: Precision
    window: Window
    preparation: ModelPreparation
    _parts: TorchParts

    def __init__(self, config: RunnerConfig | Mapping[str, object] | None = None) -> None:
        # First, since the parts of a checkpoint are named in the `__init__` of the base.
        parts = self._parts = TorchParts(self)
        super().__init__(config)
        self.model_states: ModelStates = self.build_model_states()
        # First of all: what an update left to be checked must not be saved.
        self.saver.before.insert(0, lambda: parts.update.raise_pending_error())
        self.saver.around = parts.saving
        self.saver.is_scored = lambda: parts.results.scored_at == self.state.train.global_step

    # Construction, after the `__init__` of the user

    def prepare_components(self) -> None:
        """Move and wrap the model, build optimizer, scheduler and loaders. Called on all ranks.

        Bad input is refused before the first file is written.
        """
        self._parts.check_saving()
        self.preparation = self.build_preparation()
        check_components(self, vars(self), reserved=RESERVED_FIGURES)
        self.init_fault_tolerance()
        self.precision = Precision(self.config.precision, self.device)
        self.window = Window(self.placement.optimizer, self.device)
        self._parts.choose_memory_retry()
        self.materialize_model()
        self._parts.note_trained()
        if self.stack == "ddp":
            trains = any(parameter.requires_grad for _, parameter in self.named_parameters())
            own = any(self._overrides(hook) for hook in ("build_reduction", "complete_gradients", "unscale_gradients"))
            self.preparation.check_reduced(self.model, trains=trains, reduced_by_user=own)
        self._build_if_absent()
        self._open_sources()
        self._parts.metrics = MetricSet.wrap(self.metrics, domain=self.placement.metrics, device=self.device)

    def __post_init__(self) -> None:
        """Finish what `__init__` has set up, restore the checkpoint, and look for settings without an effect. Called on all ranks."""
        super().__post_init__()
        self.preparation.note_constructed(self.model)
        if self.is_main_process:
            write_description(describe_model(self.unwrapped_model), self.workspace.metadata_dir / DESCRIPTION)
        self._parts.readiness.check_schedule(evaluates=bool(self.evaluate_splits))
        if self.is_main_process:
            warn_of(self.idle_settings)

    def build_preparation(self) -> ModelPreparation:
        """Return how the stack prepares the model: what wraps it, and where its weights are whole. Called on all ranks."""
        return ModelPreparation(self.world)

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that has no effect in this run.

        No communication: may be called on one rank.
        """
        return self._parts.idle_settings()

    def _build_if_absent(self) -> None:
        if self.optimizer is None and (self.config.get("optim", None) or self._overrides("build_optimizer")):
            self.optimizer = self.build_optimizer()
        self.build_dataloaders()
        self._data.agree_lengths(self.placement.optimizer)
        self.bind_optimizer()
        asked = self.config.get("scheduler", None) or self._overrides("build_scheduler")
        if self.scheduler is None and self.optimizer is not None and asked:
            self.scheduler = self.build_scheduler()
        self._parts.refuse_early_steps(self.optimizer)

    def _overrides(self, hook: str) -> bool:
        """Whether a hook is the user's own."""
        return not getattr(getattr(type(self), hook), "__module__", "").startswith("danling.")

    def bind_optimizer(self) -> None:
        """Bind model and optimizer to each other where a stack does, before the scheduler is built. Call on all ranks."""

    def materialize_model(self) -> None:
        """Move model and criterion to the device, average, compile and wrap the model. Call on all ranks."""
        self.model.to(self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(self.device)
        self._build_ema()
        self.compile_modules([self.model])
        self._parts.wrap_model()

    def _build_ema(self) -> None:
        settings = {key: value for key, value in self.config.ema.items() if key != "enabled"}
        if self.config.ema.enabled and self.ema is None:
            self.ema = EMA(self.model, **settings)

    def compile_modules(self, modules: Iterable[nn.Module]) -> None:
        """Compile modules in place when `compile.enable`; they are left uncompiled by `close`. Called on all ranks.

        Args:
            modules: Those that training calls: the model, or blocks of it.
        """
        if not self.config.compile.enable:
            return
        if self.compilation is None:
            self.compilation = Compilation.of(self.config.compile, distributed=self.distributed)
            self._closers.callback(self.compilation.close)
        for module in modules:
            self.compilation.compile(module)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model that training calls: DistributedDataParallel when there are several ranks. Call on all ranks.

        Args:
            model: The model, on its device.
        """
        several = self.distributed and any(parameter.requires_grad for parameter in model.parameters())
        options = self.ddp_kwargs() if several else {}
        return self.preparation.wrap(model, options, reduces_later=self._parts.memory_retry is not None)

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel`; override for unused parameters or a static graph. Called on all ranks."""
        return {"device_ids": [self.device] if self.device.type == "cuda" else None}

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of DistributedDataParallel. No communication: may be called on one rank.

        Args:
            model: The model, wrapped or not.
        """
        # The user's `__init__` may ask before anything is prepared.
        return self.preparation.unwrap(model) if "preparation" in vars(self) else model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names, free of wrapper prefixes, and parameters of the model, then those of the criterion.

        No communication: may be called on one rank.
        """
        for name, parameter in self.unwrapped_model.named_parameters():
            yield canonical_name(name), parameter
        if isinstance(self.criterion, nn.Module):
            for name, parameter in self.criterion.named_parameters():
                yield f"criterion.{name}", parameter

    def whole_weights(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Return a context in which every rank has the weights of the model whole, to look at or to write to. Enter on all ranks.

        Here every rank has them anyway. Where a stack divides them, `runner.unwrapped_model` has plain tensors of full shape inside; of
        a pipeline each rank has its own stages. Make no forward inside: training, evaluation and inference gather what they need.

        Args:
            modify: Give all ranks on exit what the first rank that holds a weight has written to it; else what is written is lost where
                weights are divided, and differs from rank to rank where they are not.
        """
        return self.preparation.whole_weights(self.unwrapped_model, modify=modify)

    def save_pretrained(self, directory: str | Path, *, averaged: bool = False, **options: Any) -> None:
        """Write the model as `from_pretrained` of transformers or peft reads it: the main process calls its `save_pretrained`.

        Of a model with adapters, these and what is trained beside them are written. Call on all ranks.

        Args:
            directory: Where to.
            averaged: Write the averaged weights instead of the trained ones.
            options: Further arguments of the model's own `save_pretrained`, such as `max_shard_size`.

        Raises:
            TypeError: If the model has no `save_pretrained`.
            ValueError: If averaged weights are asked for and there are none.
        """
        model = check_pretrained(self.unwrapped_model)
        if averaged and self.ema is None:
            raise ValueError("Expected averaged weights. Received: ema.enabled=False. Leave averaged=True out.")
        weights = self.preparation.averaged(self.ema) if averaged else nullcontext()
        with weights, self.whole_weights():
            if self.is_main_process:
                save_pretrained(model, directory, **options)
        self.world.barrier()

    def broadcast_buffers(self) -> None:
        """Give the ranks that share a part of the model the buffers of the first of them. Call on all ranks.

        DistributedDataParallel does it at the next training forward; until then those of the other ranks are their own.
        """
        self.preparation.broadcast_buffers(self.model, self._parts.criterion_tensors("buffers"))

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of `config.optim` over the parameters that require a gradient. Called on all ranks."""
        return build_optimizer(
            dict(self.config.optim.items()),
            self.named_parameters,
            device=self.device,
            whole=self.preparation.whole_parameters(self.named_parameters()),
        )

    def build_scheduler(self) -> Any:
        """Return the scheduler of `config.scheduler`; schedules over the whole run are given its length. Called on all ranks.

        Returns:
            `None` without such a section.
        """
        settings = self.config.get("scheduler", None) or {}
        return build_scheduler(settings, self.optimizer, steps=self.steps, epochs=self.epochs)

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of a forward: autocast of `config.precision`. Called on all ranks."""
        return self.precision.autocast()

    # Training

    def train(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train to the end of the budget: by epochs when `epochs` is set, else by steps. Call on all ranks.

        A run that is at its end returns at once, before it touches data, and writes nothing.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`: metrics by completed epoch or global step, then by split.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        return (self.train_steps if self.is_step_mode else self.train_epochs)(train_splits, evaluate_splits)

    def train_epochs(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train epoch by epoch until `epochs` are completed. Call on all ranks.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        to_train, to_evaluate = self._parts.driver.check_ready(train_splits, evaluate_splits)
        if self.is_step_mode:
            raise ValueError(
                f"Expected a budget of epochs for `train_epochs`. Received: steps={self.steps}. Call `train()` or `train_steps()`, or set "
                "`epochs` instead."
            )
        if self._parts.loop.is_done():
            return self.results
        with self._parts.driver.training():
            self._parts.driver.try_evaluations(to_evaluate)
            self._parts.loop.train_epochs(to_train, to_evaluate)
        return self.results

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train what is left of one pass over one split. Call on all ranks.

        What an override returns are the metrics of the split. Called alone, it trains the next pass, and closes the epoch when every
        split to train on has had its pass: `epoch` is counted, the metrics go into `results`, a schedule by epochs advances. Evaluating and
        saving are left to the caller; a signal, `stop()` and `max_time` end it as they end `train`.

        Args:
            split: The split, of a dataset or a loader to train on.

        Returns:
            The weighted mean loss of the pass over all ranks, and what was put into `meters`; empty when it was stopped half-way.
        """
        return self._parts.loop.train_epoch(split)

    def train_steps(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train update by update until `steps` are committed, pass after pass over the data. Call on all ranks.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        to_train, to_evaluate = self._parts.driver.check_ready(train_splits, evaluate_splits)
        if not self.is_step_mode:
            raise ValueError(
                f"Expected a budget of steps for `train_steps`. Received: epochs={self.epochs}. Call `train()` or `train_epochs()`, or set "
                "`steps` instead."
            )
        if self._parts.loop.is_done():
            return self.results
        with self._parts.driver.training():
            self._parts.driver.try_evaluations(to_evaluate)
            self._parts.loop.train_steps(to_train, to_evaluate)
        return self.results

    def build_agreement(self) -> PassAgreement:
        """Return what keeps the ranks together in their passes; a stack whose ranks read the same data brings its own."""
        return PassAgreement(self.placement.optimizer, self.data_domain)

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._session.request("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._session.request("save")

    def count_tokens(self, data: Any) -> float:
        """Return the tokens of a batch for the metrics of speed, 0 for data that has none; override it for batches of your own.

        No communication: may be called on one rank.

        The default counts the elements of an integer input of two dimensions `(batch, sequence)`. Called for every micro-batch on
        the host's side: look at shapes, not at values, which would wait for the device.

        Args:
            data: The batch, before it is moved to the device.
        """
        return count_tokens(data)

    def flops_per_token(self) -> float | None:
        """Return the model's FLOPs for a token, forward and backward, such as `6 * parameters`; `None` leaves it to the others.

        No communication: may be called on one rank.
        """
        return None

    def flops_per_sample(self) -> float | None:
        """Return the model's FLOPs for a sample, forward and backward.

        No communication: may be called on one rank.

        The default is what torch counted in the first micro-batch of training, where the peak of the device is known and the
        model runs as plain operations: matrix products, convolutions and attention.

        Returns:
            `None` when it is not known; then neither FLOPs nor their share of the peak is reported.
        """
        return self._reporter.flops.counted

    def peak_flops(self) -> float | None:
        """Return what one device could do at most, in FLOP/s; `None` when it is not known, as on a CPU. Never a guess.

        No communication: may be called on one rank.
        """
        return device_peak_flops(self.device, self.config.precision)

    def build_profiler(self) -> Profiler | None:
        """Return the profiler of `config.profiling`, `None` when it is off. Called on all ranks."""
        return self._parts.driver.profiler()

    # One update

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
                pred, loss = self._forward(inputs, target)
            self.backward(loss)
        return pred, loss

    def _forward(self, inputs: Any, target: Any) -> tuple[Any, Tensor]:
        """Return the prediction and the loss of a micro-batch to train on, for a stack that makes them in another way."""
        pred = call_model(self.model, inputs)
        return pred, self.compute_loss(pred, target)

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
            self._bind_reduction()
        return self._parts.update.make()

    def init_fault_tolerance(self) -> None:
        """Join the replica groups when `config.ft.enabled`. Called on all ranks of the group.

        Raises:
            ValueError: If no lighthouse is named.
            ImportError: If torchft is not installed.
            QuorumError: If the lighthouse cannot be reached.
        """
        if not self.config.ft.enabled:
            return
        member = self.fault_tolerance = self._parts.join_replica_groups()
        self._closers.callback(member.close)
        # Every forward waits for the other groups.
        self.preparation.communication = "ft.enabled=True"
        self.run_state.add_progress(member.progress_part())
        self.saver.writes = member.writes
        # As a save does, so that all groups go on alike.
        self.saver.instead.append(lambda: self.broadcast_buffers())

    @cached_property
    def reduction(self) -> GradientReduction:
        """What completes, measures, clips and applies the gradient; looked for anew when training begins, and in each pass."""
        return self._chosen_reduction()

    def _bind_reduction(self) -> None:
        """Look at model and optimizer as they are now. Called on all ranks, between updates."""
        self._parts.rewrap_if_trainables_changed()
        self.reduction = self._chosen_reduction()

    def _chosen_reduction(self) -> GradientReduction:
        self._parts.readiness.check_optimizer_given()
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
            unreduced=self._parts.unreduced,
        )

    def train_context(self) -> AbstractContextManager[object]:
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

    # Evaluation and inference

    def build_forward(self) -> EvaluationForward:
        """Return how a batch is evaluated and predicted; a stack whose ranks hold parts of the model brings its own."""
        return EvaluationForward(
            model=lambda: self.model,
            bare=lambda: self.unwrapped_model,
            context=lambda: self.forward_context(),
            loss=lambda pred, target: self.evaluated_loss(pred, target),
        )

    def to_device(self, data: Any) -> Any:
        """Return the batch on the runner's device; copies from pinned memory do not block the host.

        No communication: may be called on one rank.

        Args:
            data: The batch as its loader gives it.
        """
        return data if self.device.type == "cpu" else move_to_device(data, self.device)

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return what the mean-reduced loss of a batch is averaged over; override it where the criterion is your own.

        The default counts the targets that the criterion does not ignore, see `danling.training.criterion_weight`; without a criterion,
        the labels that the loss of the model counts, see `danling.training.model_weight`, which a `compute_loss` of your own is taken
        to count too; else samples. Called on every rank for every batch, before its forward.

        Args:
            data: The batch, on the device.
            target: Its target, `None` without one.

        Returns:
            A float, or a 0-dim tensor on the device that need not be waited for.
        """
        if self.criterion is None:
            return self._parts.loss.weight(data, target)
        return criterion_weight(self.criterion, target, data)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Return the loss of a prediction: `criterion(pred, target)`, or the `loss` that the model itself returned. Called on all ranks.

        Args:
            pred: What the model returned, any type. Of a mapping or an object with `loss` and `logits` the criterion is handed the logits.
            target: The target of the batch, `None` without one.

        Returns:
            The loss as the criterion reduces it: 0-dim.

        Raises:
            ValueError: If there is neither.
        """
        if self.criterion is not None:
            given = pred if isinstance(pred, Tensor) else prediction_of(pred)
            loss: Tensor = (
                self.criterion(given, target) if target is not None else criterion_loss(self.criterion, given, None)
            )
            return loss
        return self._parts.loss.of_model(pred, target, training=self.mode == "train")

    def evaluated_loss(self, pred: Any, target: Any) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none. Called on all ranks.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.

        Args:
            pred: What the model returned, any type.
            target: The target of the batch, `None` without one.
        """
        return self._parts.loss.of_evaluated(pred, target)

    def evaluate(self, splits: str | Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Evaluate whole splits. Call on all ranks.

        Args:
            splits: One split or several; `None` is `evaluate_splits`.

        Returns:
            Metrics by split, the same on all ranks.

        Raises:
            ValueError: If a split is unknown, or there is none.
        """
        names = self._data.splits.choose(splits, self.evaluate_splits, "evaluate")
        return {split: self.evaluate_epoch(split) for split in names}

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        """Evaluate all of one split. Call on all ranks.

        Args:
            split: The split.

        Returns:
            The mean loss and the metrics over every sample of every rank, each counted once; empty when there is none.
        """
        return self._parts.evaluator.evaluate(split, None)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        """Evaluate the first batches of one split. Call on all ranks.

        Args:
            split: The split.
            steps: Batches of each rank; `None` is a twentieth of the run's steps, at least 1.

        Returns:
            The mean loss and the metrics over the samples of these batches on all ranks.

        Raises:
            ValueError: If `steps` is not at least 1, or the split is unknown.
        """
        if steps is not None and steps < 1:
            raise ValueError(f"Expected steps to be at least 1, or None. Received: steps={steps!r}.")
        return self._parts.evaluator.evaluate(split, steps if steps is not None else max((self.steps or 0) // 20, 1))

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients. Called on all ranks.

        Called alone, it is made as in an evaluation: on the bare model in evaluation mode, with averaged weights where there are any, and
        training's random streams are left as they were.

        Args:
            data: The batch; within an evaluation it is on the device.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        return self._parts.evaluator.forward.evaluate(data)

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the metrics of an evaluation; override to add those that are no mean, such as a perplexity.

        Call on all ranks. Each metric is a number, or a tensor of one. `super().summarize(split, totals)` returns means over all
        ranks, from which others follow:
        `result["perplexity"] = math.exp(result["loss"])`.

        Args:
            split: The split that was evaluated.
            totals: Sums and weights of this rank.
        """
        result, metrics = totals.averages(self.placement.metrics), self._parts.metrics.compute(self.placement.metrics)
        check_metrics(metrics, RESERVED_FIGURES)
        return result | metrics

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[False] = False) -> list[Any]: ...

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[True]) -> Iterator[Any]: ...

    def infer(self, split: str | None = None, *, stream: bool = False) -> list[Any] | Iterator[Any]:
        """Predict every sample of a split. Call on all ranks.

        Args:
            split: The split; `None` is the first one named for inference, else the first one to evaluate.
            stream: Yield predictions as they are made, of this rank's share only, instead of gathering them.

        Returns:
            The predictions in the order of the dataset, the same on all ranks: a list of tensors on the CPU, or of plain values
            where a prediction is a single number. With `stream`, a generator.

            What `infer_step` returns is taken apart by sample: a tensor along its first dimension; a list by its items; a tuple of
            such, several outputs of a model, into a tuple for each sample; a mapping into one for each sample, of the entries that
            have as many items as the batch has samples (a `loss` has not). Anything else is one item for the whole batch.

        Raises:
            ValueError: If the split is unknown, or there is none.
        """
        chosen = self._data.splits.choose(split, self._data.splits.to_infer(self.evaluate_splits), "infer")[0]
        return self._parts.evaluator.stream(chosen) if stream else self._parts.evaluator.infer(chosen)

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; a target that comes with it is left aside. Called on all ranks.

        Called alone, it is made as in `infer`, without gradients.

        Args:
            data: The batch; within `infer` it is on the device.

        Returns:
            A tensor, list, tuple or mapping with an entry for each sample, as `infer` takes them apart.
        """
        return self._parts.evaluator.forward.infer(data)

    # What is saved and restored

    def build_model_states(self) -> ModelStates:
        """Return how the states of model, EMA and optimizer are read and loaded; a stack that divides them overrides this."""
        return ModelStates(
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            optimizer=lambda: self.optimizer,
            ema=lambda: self.ema,
        )

    def component_parts(self) -> list[StatePart]:
        """Return model, criterion, EMA, optimizer and scheduler, in the order in which they are restored."""
        parts = self._parts
        return component_parts(self, parts.frozen, leaves_out=lambda: self.config.checkpoint.trainable_only)

    def progress_parts(self) -> list[StatePart]:
        """Return what lies in the entry `state` of a checkpoint, in the order in which it is restored."""
        return [*super().progress_parts(), *self._parts.progress_parts()]

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values. Call on all ranks.

        The random streams and the states of loaders that differ from rank to rank are gathered, so every rank returns all of
        them.
        """
        self.broadcast_buffers()
        payload = super().state_dict()
        totals = self.meters.totals(self.placement.metrics)
        payload["state"]["meters"] = {name: list(pair) for name, pair in totals.items()}
        return payload

    def model_state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of the bare model, by canonical name. Called on all ranks."""
        return self.model_states.model_state()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name. Called on all ranks."""
        return self.model_states.optimizer_state()

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint, of which this rank reads what it holds. Call on all ranks.

        Args:
            checkpoint: A name in the run's own checkpoint directory, or a path.

        Returns:
            Tensors and plain values by component: `model`, `optimizer`, `state`, ...

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
        """
        template = self.model_states.template()
        if template is None:
            return super().read_checkpoint(checkpoint)
        template["model"] = self.model_state_dict()
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(checkpoint, template=template)
        return payload

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore a payload: components, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        super().load_state_dict(self.model_states.opened(state, self.run_state.excluded))

    def load_components(self, payload: Mapping[str, object], excluded: set[str]) -> None:
        """Restore model, criterion, EMA, optimizer and scheduler, in this order. Called on all ranks.

        Args:
            payload: What is left of the payload of a checkpoint.
            excluded: The dotted paths that were left out of it.
        """
        options = options_of(self.optimizer) if self.optimizer is not None else []
        super().load_components(payload, excluded)
        if self.optimizer is not None and "optimizer" in payload:
            allows = self.run_state.excluded.allows_setting
            adopt_options(
                self.optimizer,
                self.scheduler,
                options,
                lambda name: allows(f"optim.{name}") or allows("optim.param_groups"),
            )

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load model weights by canonical name into the bare model. Called on all ranks.

        Args:
            state: Tensors by name.
            partial: Allow names that were excluded from loading to be missing.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model.
        """
        self.model_states.load_model(state, partial=partial)

    def load_ema(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Restore the averaged weights. Called on all ranks.

        Args:
            state: What `EMA.state_dict` returned: `weights` by canonical name, and `num_updates`.
            partial: Begin the average of weights that are missing at the model's, instead of refusing.

        Raises:
            CheckpointMismatch: If names are not those of the model.
        """
        self.model_states.load_ema(state, partial=partial)

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks.

        Args:
            state: `state` by parameter name, and `param_groups` with parameter names.
        """
        self.model_states.load_optimizer(state)

    def load_scheduler(self, state: Mapping[str, object]) -> None:
        """Restore the scheduler. Called on all ranks.

        Args:
            state: What the schedule's `state_dict` returned.
        """
        self.scheduler.load_state_dict(dict(state))

    def load_pretrained(self, checkpoint: str | Path) -> None:
        """Load only the model; everything else starts afresh. Call on all ranks.

        Args:
            checkpoint: A checkpoint of this library, or a file with a plain `state_dict`.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If names or shapes are not those of the model; `checkpoint.exclude_from_loading` leaves some out.
        """
        weights = read_model(self.checkpoint_manager, checkpoint)
        # Only weights are read for finetuning, so other exclusions would match nothing there.
        payload, excluded = exclude({"model": weights}, self.run_state.excluded.parts_of("model"))
        self.load_model(payload["model"], partial=bool(excluded))
        if self.ema is not None:
            self.ema.reset()
        logger.info("Loaded the weights of %s.", checkpoint)
