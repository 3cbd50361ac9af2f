"""The runner for one process or several copies of a model: construction, loops, one update, evaluation, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.checkpoints import FileCheckpointManager, exclude, read_model
from danling.checkpoints.exchange import (
    DESCRIPTION,
    check_pretrained,
    describe_model,
    save_pretrained,
    write_description,
)
from danling.config.checks import endless_streams, idle_settings
from danling.config.lock import BUDGET
from danling.data import LoaderSettings, move_to_device
from danling.distributed import StepTotals
from danling.metrics import Meters
from danling.optim import JointOptimizer, JointScheduler
from danling.optim.registry import build_optimizer, build_scheduler, without_fused
from danling.optim.schedule_state import load_schedule
from danling.optim.state import (
    adopt_options,
    enter_training,
    evaluation_weights,
    options_of,
    put_beginning_of_schedule,
    put_rates_of,
    rebuilt,
)
from danling.reporting import device_peak_flops
from danling.supervision import Profiler
from danling.training import (
    EMA,
    DDPReduction,
    GradientReduction,
    PassAgreement,
    Precision,
    UpdateOutcome,
    Window,
    call_model,
    count_tokens,
    criterion_loss,
    criterion_weight,
    prediction_of,
    unpack_batch,
)
from danling.training.batches import returned_loss
from danling.training.canonical_sum import CanonicalReduction
from danling.training.checks import (
    check_components,
    check_kinds,
    check_modes,
    check_reduced,
    check_retries,
    check_settings,
    misnamed,
)
from danling.training.evaluation import EvaluationForward
from danling.training.model_states import ModelStates
from danling.training.phases import PhasedModel
from danling.training.precision import no_autocast
from danling.training.preparation import ModelPreparation, settle_buckets
from danling.training.progress_file import ProgressFile
from danling.training.run_state import StatePart, component_parts, progress_parts
from danling.training.schedule import mode_of_schedule
from danling.training.tied_weights import untied
from danling.utils.hooks import is_overridden
from danling.utils.tensors import canonical_name

from .base_runner import BaseRunner, Results, SplitNames
from .direct_calls import prepared, together
from .extensions import load
from .parts import TorchParts

if TYPE_CHECKING:
    from danling.audit.layout_check import LayoutReport
    from danling.audit.rerun import AuditResult
    from danling.graph.compilation import Compilation
    from danling.torchft.member import ReplicaMember

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
    shifts_labels: bool | None = None
    """Whether the loss that the model returns compares each position with the label of the next one; `None` looks it up by class."""
    fault_tolerance: ReplicaMember | None = None
    """This process's replica group among the others; `None` unless `ft.enabled`."""

    # Made after the user's `__init__`. The annotation reserves the name: a program that sets it is refused.
    precision: Precision
    window: Window
    preparation: ModelPreparation
    _parts: TorchParts
    _enters_contexts = True
    """Whether `train_step` has to enter `train_context` and `forward_context`, since at least one of them does something."""

    def _make_parts(self) -> TorchParts:
        return TorchParts(self)

    @cached_property
    def model_states(self) -> ModelStates:
        """The component that reads and loads the states of model, EMA and optimizer."""
        return self.build_model_states()

    # Construction, after the `__init__` of the user

    def prepare_components(self) -> None:
        """Move and wrap the model, build optimizer, scheduler and loaders.

        Bad input is refused before the first file is written.
        """
        check_settings(self)
        self.preparation = self.build_preparation()
        self._join_components()
        check_components(self)
        self._parts.prepare()
        # After `prepare`, whose `recompute` takes back the updates that the replica groups do not commit.
        self.init_fault_tolerance()
        self.precision = Precision(self.config.precision, self.device)
        self.window = Window(self.placement.optimizer, self.device)
        check_retries(self, finds_micro_batch_size=self._parts.data.finds_micro_batch_size)
        self.materialize_model()
        if self._parts.recorder is not None:
            self._parts.recorder.note_division()
        if self.config.checkpoint.trainable_only:
            # Weights that the program freezes before the first save are saved too: they may have been trained until then.
            self._parts.frozen.note_trained()
        check_reduced(self)
        # Only now are the parameters on the device, and divided where the stack divides them.
        self._build_optimizer()
        self.build_dataloaders()
        # A schedule over the whole run takes its length from the loaders, and all ranks must have the same.
        self._parts.data.agree_lengths()
        self.bind_optimizer()
        self._build_scheduler()
        self._parts.keys.seed_early_steps(self.optimizer, self._parts.closers)
        check_modes(self)
        # Schedule-free optimizers have other weights for evaluations than for training.
        enter_training(self.optimizer)
        self._open_sources()
        if self._parts.canonical is not None:
            self._parts.canonical.check()
        self._parts.complete()
        self._parts.asked_options.note()
        self._parts.run_recorder.note()

    def _join_components(self) -> None:
        """Make one optimizer and one schedule of several by name."""
        if isinstance(self.optimizer, Mapping):
            self.optimizer = JointOptimizer(**self.optimizer)
        if isinstance(self.scheduler, Mapping):
            self.scheduler = JointScheduler(**self.scheduler)

    def _build_optimizer(self) -> None:
        is_described = self.config.get("optim", None) or is_overridden(self, "build_optimizer")
        if self.optimizer is None and is_described:
            self.optimizer = self._parts.built_optimizer = self._built("optimizer")

    def _build_scheduler(self) -> None:
        is_described = self.config.get("scheduler", None) or is_overridden(self, "build_scheduler")
        is_missing = self.scheduler is None and self.optimizer is not None
        if is_missing and is_described:
            self.scheduler = self._parts.checks.built_scheduler = self._built("scheduler")

    def _built(self, component: str) -> Any:
        """Call `build_optimizer` or `build_scheduler`. Many programs assign the component there and return nothing."""
        made = getattr(self, f"build_{component}")()
        if made is not None:
            setattr(self, component, made)
        self._join_components()
        check_kinds(self)
        return getattr(self, component)

    def __post_init__(self) -> None:
        """Finish construction, restore the checkpoint, and warn of settings without an effect."""
        super().__post_init__()
        self.preparation.note_constructed(self.model)
        if self.is_main_process:
            write_description(
                describe_model(self.unwrapped_model), self.workspace.metadata_dir / DESCRIPTION
            )
        self._parts.checks.check_schedule(evaluates=bool(self.evaluate_splits))
        if self.is_main_process:
            for message in self.idle_settings():
                logger.warning("%s", message)

    def open_workspace(self) -> None:
        """Create the run directory, open its log, and begin `progress.json`, on the main process."""
        super().open_workspace()
        if self.is_main_process and not self.config.checkpoint.load_only:
            progress = ProgressFile(self, self._parts.session)
            self._parts.session.observers.append(progress)
            self._parts.closers.callback(progress.close)

    def build_preparation(self) -> ModelPreparation:
        """Return the component that wraps and unwraps the model and gathers its weights for this stack."""
        return ModelPreparation(self.world)

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that has no effect in this run. No communication: may be called on one rank."""
        data = self._parts.data
        trained = self.train_splits
        built = [self.sources[split] for split in self.datasets if split in self.sources]
        divides = any(
            data.division(split) or isinstance(self.datasets.get(split), LoaderSettings)
            for split in trained
        )
        sentences = idle_settings(
            self.config,
            evaluates=bool(self.evaluate_splits),
            step_mode=self.is_step_mode,
            positioned=all(source.kind in ("position", "sampled") for source in built),
            writes_files=isinstance(self.checkpoint_manager, FileCheckpointManager),
            divides_updates=divides or not trained,
        )
        sentences += data.idle_settings()
        sentences += self.preparation.idle_settings()
        if not self.is_step_mode:
            sentences += endless_streams(trained, data.lengths or {})
        sentences += misnamed(self, self._parts.built_optimizer, self._parts.checks.built_scheduler)
        return sentences

    def _overrides_any(self, *hooks: str) -> bool:
        """Whether a subclass, another stack or an attribute of the instance overrides one of these hooks of `TorchRunner`."""
        kind = type(self)
        own = vars(self)
        # A list, since each item that `any` takes of a generator is a call, and each pass asks.
        found = [
            hook
            for hook in hooks
            if hook in own or getattr(kind, hook) is not getattr(TorchRunner, hook)
        ]
        return bool(found)

    def bind_optimizer(self) -> None:
        """Bind model and optimizer to each other, on stacks that need it, before the scheduler is built."""

    def materialize_model(self) -> None:
        """Move model and criterion to the device, create the EMA, compile and wrap the model."""
        self.model.to(self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(self.device)
        self._build_ema()
        self.compile_modules([self.model])
        self._wrap()

    def _wrap(self) -> None:
        """Put the model into the wrapper of the stack."""
        # DistributedDataParallel reads the compiler's setting as well.
        settings: AbstractContextManager[object] = nullcontext()
        if self.compilation is not None:
            settings = self.compilation.settings()
        with settings:
            self.model = self.wrap_model(self.model)
        self.preparation.note_wrapped(self.unwrapped_model)
        if isinstance(self.model, DistributedDataParallel):
            # The wrapper has made the model's parameters and buffers equal on all ranks, and knows no criterion.
            self._broadcast_criterion()
            # The sum of three or more ranks depends on the order in which they are added, and that on the layout of the buckets.
            if self.world.size > 2 and not self._parts.data.finds_micro_batch_size:
                settle_buckets(self.model, self.world)

    def _broadcast_criterion(self) -> None:
        """Begin with the criterion of the first rank: others may have drawn or loaded another one."""
        for tensor in (*self._criterion_tensors("parameters"), *self._criterion_tensors("buffers")):
            self.world.broadcast(tensor.data)

    def _criterion_tensors(self, kind: Literal["parameters", "buffers"]) -> list[Tensor]:
        """Return the parameters or the buffers of the criterion, if it is a module."""
        if not isinstance(self.criterion, nn.Module):
            return []
        return list(getattr(self.criterion, kind)())

    def _build_ema(self) -> None:
        settings = {key: value for key, value in self.config.ema.items() if key != "enabled"}
        if self.config.ema.enabled and self.ema is None:
            self.ema = EMA(self.model, **settings)

    def compile_modules(self, modules: Iterable[nn.Module]) -> None:
        """Compile modules in place when `compile.enable`; they are left uncompiled by `close`."""
        if self.config.compile.enable:
            load("graph").compile_modules(self, modules, self._parts.closers)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model that training calls: DistributedDataParallel when there are several ranks."""
        if self._parts.canonical is not None:
            # The canonical sum adds the gradients of the ranks after the backward: no wrapper is needed, only equal values to begin with.
            for tensor in (*model.parameters(), *model.buffers()):
                self.world.broadcast(tensor.data)
            self._broadcast_criterion()
            return model
        is_wrapped = self.distributed and any(
            parameter.requires_grad for parameter in model.parameters()
        )
        options = self.ddp_kwargs() if is_wrapped else {}
        if isinstance(self.optimizer, JointOptimizer) and self.optimizer.named:
            self.preparation.wrapper = PhasedModel
        return self.preparation.wrap(
            model, options, reduces_later=self._parts.data.finds_micro_batch_size
        )

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel`; override for unused parameters or a static graph."""
        device_ids = [self.device] if self.device.type == "cuda" else None
        return {"device_ids": device_ids}

    def unwrap(self, model: Any) -> Any:
        # The user's `__init__` may ask before anything is prepared.
        return self.preparation.unwrap(model) if "preparation" in vars(self) else model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names, free of wrapper prefixes, and parameters of the model, then those of the criterion.

        No communication: may be called on one rank."""
        for name, parameter in self.unwrapped_model.named_parameters():
            yield canonical_name(name), parameter
        if isinstance(self.criterion, nn.Module):
            for name, parameter in self.criterion.named_parameters():
                yield f"criterion.{name}", parameter

    def whole_weights(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Return a context in which every rank has the whole weights of the model, to read or to write. Enter on all ranks.

        On `ddp` every rank has them anyway. On stacks that divide them, the parameters of `runner.unwrapped_model` are plain tensors of
        full shape inside; in a pipeline each rank has its own stages. Do not run the model inside: training, evaluation and inference
        gather what they need by themselves.

        Args:
            modify: On exit, broadcast each weight from the first rank that holds it. Without it, writes are lost if weights are divided,
                and stay on the rank that made them if they are not.
        """
        return self.preparation.whole_weights(self.unwrapped_model, modify=modify)

    def save_pretrained(
        self, directory: str | Path, *, averaged: bool | None = None, **options: Any
    ) -> None:
        """Write files that `from_pretrained` of transformers or peft reads: the main process calls the model's `save_pretrained`.

        For a model with adapters, the adapters and the modules that are trained with them are written.

        Args:
            directory: Directory for the files.
            averaged: Write the EMA weights, or the trained ones; `None` writes those that an evaluation uses.
            options: Further arguments of the model's own `save_pretrained`, such as `max_shard_size`.
        """
        model = check_pretrained(self.unwrapped_model)
        self._parts.update.check_updates_made()
        if averaged and self.ema is None:
            raise ValueError(
                "Expected averaged weights. Received: ema.enabled=False. Leave averaged=True out."
            )
        if averaged is None and self.ema is not None:
            averaged = True
            logger.info(
                "Writing the averaged weights, which are evaluated. averaged=False writes the trained ones."
            )
        weights = self.preparation.averaged(self.ema) if averaged else nullcontext()
        with evaluation_weights(self.optimizer), weights, self.whole_weights():
            if self.is_main_process:
                save_pretrained(model, directory, **options)
        # No rank may go on to read files that the main process is still writing.
        self.world.barrier()

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers of the first rank to the ranks that share a part of the model.

        DistributedDataParallel does it only at the next training forward; until then ranks may have different buffers, and averages have
        them too. A save in parts may take what is whole from any rank.
        """
        kept = self.ema.kept_buffers if isinstance(self.ema, EMA) else []
        self.preparation.broadcast_buffers(self.model, [*self._criterion_tensors("buffers"), *kept])

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of `config.optim` over the parameters that require a gradient."""
        settings = dict(self.config.optim.items())
        if self._parts.canonical is not None:
            settings = without_fused(settings)
        return build_optimizer(
            settings,
            self.named_parameters,
            model=self.unwrapped_model,
            device=self.device,
            whole=self.preparation.whole_parameters(self.named_parameters()),
        )

    def build_scheduler(self) -> Any:
        """Return the scheduler of `config.scheduler`; schedules over the whole run get its length."""
        settings = self.config.get("scheduler", None) or {}
        mode = mode_of_schedule(self)
        return build_scheduler(
            settings, self.optimizer, steps=self.steps, epochs=self.epochs, mode=mode
        )

    def _follow_setting(self, key: str) -> None:
        """Follow the change of a live setting. Another budget rebuilds the schedule for its length, as a resume with that budget does."""
        super()._follow_setting(key)
        self._parts.loop.due.read_intervals()
        is_budget = key in BUDGET and self.config[key] is not None
        if not is_budget or self.scheduler is None:
            return
        checks = self._parts.checks
        if self.scheduler is checks.built_scheduler:
            self.scheduler = checks.built_scheduler = rebuilt(
                self.scheduler, self.optimizer, partial(self._built, "scheduler")
            )
        elif self.is_main_process:
            logger.warning(
                "The budget is now %s=%s. `self.scheduler` was made by your program and keeps its length. Return it from "
                "`build_scheduler`, which is called again when the budget changes.",
                key,
                self.config[key],
            )

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of a forward: autocast of `config.precision`."""
        self.precision.is_entered = True
        return self.precision.autocast()

    # Training

    def train(self, train_splits: SplitNames = None, evaluate_splits: SplitNames = None) -> Results:
        """Train to the end of the budget: by epochs when `epochs` is set, else by steps.

        A run that has already reached its budget returns at once, without reading data or writing files.

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
        with together(self, "train"):
            if self.is_step_mode:
                return self.train_steps(train_splits, evaluate_splits)
            return self.train_epochs(train_splits, evaluate_splits)

    def train_epochs(
        self, train_splits: SplitNames = None, evaluate_splits: SplitNames = None
    ) -> Results:
        """Train epoch by epoch until `epochs` are completed, as `train` does."""
        with together(self, "train_epochs"):
            self._parts.loop.train("epochs", train_splits, evaluate_splits)
        return self.results

    def train_steps(
        self, train_splits: SplitNames = None, evaluate_splits: SplitNames = None
    ) -> Results:
        """Train update by update until `steps` are committed, pass after pass over the data, as `train` does."""
        with together(self, "train_steps"):
            self._parts.loop.train("steps", train_splits, evaluate_splits)
        return self.results

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train the rest of one pass over one split.

        If you override it, return the metrics of the split. If you call it outside of `train`, it trains the next pass. The epoch ends
        when every split to train on has had its pass: `epoch` is increased, the metrics go into `results`, a schedule by epochs advances.
        You evaluate and save yourself; a signal, `stop()` and `max_time` end it as they end `train`.

        Returns:
            The weighted mean loss of the pass over all ranks and the means of `meters`; empty if the pass was stopped half-way.
        """
        with together(self, "train_epoch"):
            session, loop = self._parts.session, self._parts.loop
            if session.running or session.in_step:
                return loop.train_epoch(split)
            metrics: dict[str, float] = prepared(self, "train_epoch", loop.train_epoch, split)
            return metrics

    def check_layout(self, layout: str, **options: Any) -> LayoutReport:
        """Compare the first updates of this program on a layout with those in one process, as `danling check-layout` does.

        The program is started again in separate processes, with the same arguments; each ends where it reaches this call or a training.
        This runner does not change.

        Args:
            layout: Axes and their degrees, such as `"shard=2,tensor=2"`; or `"ddp=2"`, `"accelerate=2"`.
            options: `updates`, `dtype` (`"float64"`, or `None` for the precision of the program), `batch`, `tolerance` and `timeout`, see
                `danling.audit.layout_check.CheckOptions`.

        Returns:
            What was found: `is_same`, a `summary`, and a finding for each parameter that differs; printed, the table of the command.

        Raises:
            NotChecked: If the program fails in them, or the updates are not of the same samples.
            ValueError: If there is no such layout, or the program cannot be started again, as in a notebook.
        """
        report: LayoutReport = load("audit").check_layout(self, layout, **options)
        return report

    def audit(
        self,
        from_checkpoint: int | None = None,
        to_checkpoint: int | None = None,
        *,
        scratch: str | Path | None = None,
    ) -> AuditResult:
        """Train between two checkpoints of this run again, and say whether the end is bitwise the stored one.

        Another runner of this class, made of a copy of `config` alone, trains in a scratch directory; nothing is written into the run. Call
        it outside of a training. `danling audit RUN -- python train.py` does the same from outside, with any program.

        Args:
            from_checkpoint: Updates at the checkpoint to begin from; 0 is from scratch, `None` the last one before the end.
            to_checkpoint: Updates at the one to compare with; `None` is the newest.
            scratch: Directory to train in, which is kept; shared by all ranks. `None` takes one that is removed.

        Returns:
            Whether all is the same, which entries of the checkpoints differ, and where the logged figures begin to differ; the same on
            all ranks.

        Raises:
            FileNotFoundError: If the run has no checkpoint.
            ValueError: If the run has no checkpoint at one of these updates, or is training.
        """
        result: AuditResult = load("audit").audit_runner(
            self, from_checkpoint, to_checkpoint, scratch, is_training=self._parts.session.running
        )
        return result

    def on_pass_start(self, split: str) -> None:
        """Called on all ranks at the beginning of a pass over a split to train on, before its first batch is read; override it.

        Set here what a pass begins with, such as `self.carry`. A run that is resumed within a pass does not call it for the rest of that
        pass. The first batch of a stream is read before the call, since only that shows whether there is one more pass.
        """

    def build_agreement(self) -> PassAgreement:
        """Return how the ranks end a pass together; a stack whose ranks read the same data overrides it."""
        return PassAgreement(self.placement.optimizer, self.data_domain)

    def log_metric(
        self, name: str, value: float | Tensor, weight: float | Tensor | None = None
    ) -> None:
        """Add a metric within `train_step` or `evaluate_step`: a weighted mean over the pass and all ranks, shown with the loss.

        No communication: may be called on one rank. A value on an accelerator is not waited for.

        Args:
            name: Its name, another one than `loss`.
            value: A mean over the micro-batch, 0-dim.
            weight: What it is a mean over; `None` is the weight of the micro-batch's loss, see `batch_weight`.
        """
        if weight is None:
            weight = (
                self.window.current if self.mode == "train" else self._parts.evaluator.batch_weight
            )
        self.meters.update({name: value}, weight)

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._parts.session.request("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._parts.session.request("save")

    def count_tokens(self, data: Any) -> float:
        """Return the number of tokens of a batch, which the reported speed counts, 0 if it has none; override it for your own batches.

        No communication: may be called on one rank.

        The default counts the elements of an integer input of two dimensions `(batch, sequence)`. It is called for every
        micro-batch: read shapes rather than values, which would synchronize with the device.
        """
        return count_tokens(data)

    def flops_per_token(self) -> float | None:
        """Return the model's FLOPs for a token, forward and backward, such as `6 * parameters`; `None` uses `flops_per_sample`.

        No communication: may be called on one rank."""
        return None

    def flops_per_sample(self) -> float | None:
        """Return the model's FLOPs for a sample, forward and backward. No communication: may be called on one rank.

        The default is the number that torch counted in the first micro-batch of training (matrix products, convolutions and attention),
        if the peak of the device is known and the model is not compiled.

        Returns:
            The number, `None` if it is not known; then neither FLOP/s nor their share of the peak is reported.
        """
        return self._parts.reporter.telemetry.counted_flops

    def peak_flops(self) -> float | None:
        """Return the peak of one device in FLOP/s; `None` if it is not in the table of data sheets, as for a CPU.

        No communication: may be called on one rank."""
        return device_peak_flops(self.device, self.config.precision)

    def build_profiler(self) -> Profiler | None:
        """Return the profiler of `config.profiling`, `None` when it is off."""
        return Profiler(self) if self.config.profiling.enabled else None

    # One update

    def train_step(self, data: Any) -> tuple[Any, Any]:
        """Run one micro-batch forward and backward. Called on all ranks, `accum_steps` times an update.

        Override it to compute the loss in your own way, and call `self.backward(loss)` with the mean-reduced loss of the batch. Enter
        `forward_context`, which is autocast, as the default does. An override runs in the context of a stack in which only the last
        micro-batch communicates; one that enters `train_context` also enters what you have overridden that with.
        Called by a user, it runs one micro-batch of the open window, moved to the device and weighted as in the loops; `step()` makes the
        update.

        Returns:
            The prediction and the loss; in an override both may be `None`.
        """
        if not self._parts.session.in_step:
            # Called by a program, and not by a loop of the library.
            returned: tuple[Any, Any] = prepared(
                self, "train_step", partial(TorchRunner.train_step, self), data
            )
            return returned
        if type(data) in (tuple, list) and len(data) == 2:
            # Most batches are a plain pair. Taken apart here, they save a call, which takes as long as a small operation of torch.
            inputs, target = data
        else:
            inputs, target = unpack_batch(data, self.unwrapped_model)
        if not self._enters_contexts:
            pred, loss = self._pred_and_loss(inputs, target)
            self.backward(loss)
            return pred, loss
        with self.train_context() or nullcontext():  # an override may return None
            with self.forward_context() or nullcontext():
                pred, loss = self._pred_and_loss(inputs, target)
            self.backward(loss)
        return pred, loss

    def _pred_and_loss(self, inputs: Any, target: Any) -> tuple[Any, Tensor]:
        """Return the prediction and the loss of a micro-batch in training; a stack may compute them in another way."""
        pred = self.model(inputs) if isinstance(inputs, Tensor) else call_model(self.model, inputs)
        if self.window.may_weigh_nothing:
            self.window.cut(pred)
        return pred, self.compute_loss(pred, target)

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss of the open micro-batch, multiplied by its weight.

        Call it in `train_step`, for which a micro-batch is open: its weight is that of the loss.

        Args:
            loss: 0-dim, as the criterion reduced it.

        Raises:
            ValueError: If no micro-batch is open, or the loss depends on no parameter that is trained.
        """
        parts, window = self._parts, self.window
        if window.count == 0 and not parts.session.running:
            window.check_open()
        if parts.phases is not None and not parts.phases.takes_loss():
            return
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ValueError(
                "Expected a loss that depends on parameters that are trained. Received: one without a gradient. Look for .detach(), "
                ".item(), torch.no_grad() or a frozen model on the way to it."
            )
        scaled = window.scale(loss)
        scaler = self.reduction.scaler
        if scaler is not None:
            scaled = scaler.scale(scaled)
        parts.update.back_propagate(scaled)

    def optimizing(
        self, name: str, *, every: int = 1, weight: float | Tensor | None = None
    ) -> AbstractContextManager[bool]:
        """Make an update of one of several optimizers: a block of `train_step` that calls `self.backward(loss)`.

        For `self.optimizer = {"critic": ..., "actor": ...}`. The update is made at the end of the block, in the last micro-batch of a
        window, so that the next block computes with the new weights. Each optimizer has its own gradient norm and clipping, its own check
        whether the update is finite and, in float16, its own scale. Gradients for parameters of the other optimizers are dropped. However
        many blocks there are, `global_step` grows by one.

            with self.optimizing("critic"):
                self.backward(critic_loss(...))
            with self.optimizing("actor", every=2) as due:
                if due:
                    self.backward(actor_loss(...))

        Args:
            name: Name of the optimizer.
            every: Make the update in each n-th pass through `train_step` only. In the others `self.backward` does nothing.
            weight: What the loss of the block is averaged over, if that is not the weight of the batch.

        Returns:
            A context, whose value is whether the update is due in this pass.
        """
        if self._parts.phases is None:
            raise ValueError(
                f"Expected optimizers by name for optimizing({name!r}). Received: a {type(self.optimizer).__name__}. Assign "
                f"self.optimizer = {{{name!r}: ..., ...}} in __init__."
            )
        return self._parts.phases.optimizing(self._parts.update, name, every=every, weight=weight)

    def _run_train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Call a `train_step` with a micro-batch of the window; a stack may call it in another way."""
        return step(data)

    def _run_evaluate_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Call an `evaluate_step`; a stack may call it in another way."""
        return step(data)

    def step(self) -> UpdateOutcome:
        """Close the window: agree on its weight and whether it is finite, scale the gradient, and decide the update.

        Returns:
            Whether the update was made, else the reason; its weight, loss, samples and gradient norm. The same on all ranks.
        """
        session = self._parts.session
        if not (session.in_update or session.in_step):
            # Called by a program, and not by a loop of the library.
            outcome: UpdateOutcome = prepared(self, "step", partial(TorchRunner.step, self))
            return outcome
        # The program may have assigned another optimizer since the update before.
        if self.reduction.optimizer is not self.optimizer:
            self._bind_reduction()
        return self._parts.update.make()

    def init_fault_tolerance(self) -> None:
        if not self.config.ft.enabled:
            return
        parts = self._parts
        member: ReplicaMember = load("torchft").ReplicaMember(
            self, parts.session, parts.live_state, parts.recompute
        )
        self.fault_tolerance = member
        member.join_training(parts.extensions)
        self._parts.closers.callback(member.close)
        # Every forward waits for the other groups, for which `check_retries` refuses dataloader.micro_batch_size='auto'.
        self.preparation.communication = "ft.enabled=True"

    @cached_property
    def reduction(self) -> GradientReduction:
        """The component that completes, measures, clips and applies the gradient; made again when training and each pass begin."""
        return self._new_reduction()

    def _bind_reduction(self) -> None:
        """Make the reduction again for the present model and optimizer. Called on all ranks, between updates."""
        if self.preparation.trainables_changed(self.unwrapped_model):
            # DistributedDataParallel reduces the parameters that required a gradient when it was made: wrap the model again.
            self.model = self.unwrap(self.model)
            self._wrap()
            self.preparation.note_constructed(self.model)
        self.reduction = self._new_reduction()
        # Decided here and not at construction: the program may have set a method on the runner since.
        overrides_context = self._overrides_any("train_context", "forward_context")
        # That of replica groups is no `GradientReduction`; it enters the context of the reduction that it wraps.
        has_context = (
            getattr(type(self.reduction), "context", None) is not GradientReduction.context
        )
        casts = self.precision.autocast is not no_autocast
        self._enters_contexts = overrides_context or has_context or casts
        self._parts.update.moves_batches = self.device.type != "cpu" or self._overrides_any(
            "to_device"
        )
        self._parts.skipped.bind()
        if self._parts.phases is not None:
            self._parts.phases.bind()

    def _new_reduction(self) -> GradientReduction:
        """Return the reduction for the present model and optimizer, within that of the replica groups if there are any."""
        self._parts.checks.check_optimizer_given()
        reduction = self.build_reduction()
        return reduction if self.fault_tolerance is None else self.fault_tolerance.around(reduction)

    def build_reduction(self) -> GradientReduction:
        """Return the component that completes, measures, clips and applies the gradient; override it in your own stack."""
        parts = self._parts
        if parts.canonical is not None:
            return CanonicalReduction(self, parts.canonical)
        if not isinstance(self.model, DistributedDataParallel):
            return GradientReduction(self)
        if parts.phases is not None:
            return DDPReduction(self, averages="optimizer")
        if parts.data.finds_micro_batch_size:
            return DDPReduction(self, averages="all")
        return DDPReduction(self, averages="criterion")

    def train_context(self) -> AbstractContextManager[object]:
        """Return the context of the forward and backward of one micro-batch; gradients are reduced on the last one only."""
        return self.reduction.context(last=self.window.reduces)

    def complete_gradients(self) -> None:
        """Finish the reduction over the ranks of gradients that the backward has not reduced."""
        self.reduction.complete()

    def unscale_gradients(self, totals: StepTotals) -> list[Tensor]:
        """Divide the accumulated gradient by the global weight of the window, and by the scale of float16.

        Args:
            totals: What the ranks agreed on for the window.

        Returns:
            The gradients that exist, or this rank's shares of them.
        """
        reduction = self.reduction
        return reduction.unscale(
            self.window.gradient_factor(totals.weight, reduction.mean_over), totals.weight
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates; groups may be added while training goes on."""
        return self.reduction.parameters

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks of the optimizer domain.

        Args:
            gradients: What `unscale_gradients` returned.
        """
        return self.reduction.norm(gradients)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Clip by `max_grad_norm`, then by `max_grad_value`. Override it to change the gradient of an update that will be made.

        The gradient is reduced over the ranks and divided by the global weight. It is in the `grad` of `self.parameters`, divided as these
        are; under DeepSpeed the engine holds it. A gradient penalty is a term of the loss: compute it in `train_step`.

        Args:
            grad_norm: 2-norm of the whole gradient, 0-dim.
        """
        self.reduction.clip(grad_norm, self.config.max_grad_norm, self.config.max_grad_value)

    def optimizer_step(self) -> None:
        """Apply a committed update to the weights, with the gradient as it is."""
        if self.reduction.optimizer is not self.optimizer:
            # Within a phase it is that of the phase; else the program has replaced the optimizer.
            in_phase = self._parts.phases is not None and self._parts.phases.current is not None
            if not in_phase:
                self.reduction = self._new_reduction()
        if self.precision.scaler is not None and not self._parts.session.running:
            self.window.check_open()
        self.reduction.apply()

    def zero_gradients(self) -> None:
        """Drop the gradient of the window, whether it was applied or not."""
        self.reduction.zero()

    # Evaluation and inference

    def build_forward(self) -> EvaluationForward:
        """Return how a batch is evaluated and predicted; a stack whose ranks hold parts of the model overrides it."""
        return EvaluationForward(self)

    def to_device(self, data: Any) -> Any:
        """Return the batch on the runner's device; copies from pinned memory do not block the host.

        No communication: may be called on one rank.
        """
        return data if self.device.type == "cpu" else move_to_device(data, self.device)

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return the weight of a batch: how many terms its mean-reduced loss averages. Override it for your own criterion.

        The default counts the targets that the criterion does not ignore, see `danling.training.criterion_weight`; without a criterion,
        the labels that the model's own loss counts, see `danling.training.model_weight` (your own `compute_loss` is assumed to count
        the same; `shifts_labels` says whether the first label of a sequence counts); otherwise samples. Called on every rank for every
        batch, before its forward.

        Args:
            data: The batch, on the device.
            target: Its target, `None` without one.

        Returns:
            A float, or a 0-dim tensor on the device, so that the host need not wait for it.
        """
        if self.criterion is None:
            return self._parts.loss.weight_of_model(data, target)
        return criterion_weight(self.criterion, target, data)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Return the loss of a prediction: `criterion(pred, target)`, or the `loss` that the model itself returned.

        Args:
            pred: What the model returned, any type. From a mapping or an object with `loss` and `logits` the criterion gets the logits.
            target: The target of the batch, `None` without one.

        Returns:
            The loss as the criterion reduces it: 0-dim.
        """
        if self.criterion is not None:
            # A tensor is what most models return, and needs no call.
            given = pred if isinstance(pred, Tensor) else prediction_of(pred)
            loss: Tensor = criterion_loss(self.criterion, given, target)
            return loss
        return returned_loss(pred)

    def evaluated_loss(self, pred: Any, target: Any) -> Tensor | None:
        """Return the loss of an evaluated batch, computed as in training; `None` if it has none.

        A batch without a target has a loss only if the batches to train on have no target either, as for an autoencoder.

        Args:
            pred: What the model returned, any type.
            target: The target of the batch, `None` without one.
        """
        return self._parts.loss.of_evaluated(pred, target)

    def evaluate(self, splits: SplitNames = None) -> dict[str, dict[str, float]]:
        """Evaluate whole splits.

        Args:
            splits: One split or several; `None` is `evaluate_splits`.

        Returns:
            Metrics by split, the same on all ranks.
        """
        with together(self, "evaluate"):
            names = self._parts.data.choose(splits, self.evaluate_splits, "evaluate")
            return {split: self.evaluate_epoch(split) for split in names}

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        """Evaluate all of one split.

        Returns:
            The mean loss and the metrics over every sample of every rank, each counted once; empty when there is none.
        """
        with together(self, "evaluate_epoch"):
            return self._parts.evaluator.evaluate(split, None)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        """Evaluate the first batches of one split.

        Args:
            split: The split.
            steps: Batches of each rank; `None` is a twentieth of the run's steps, at least 1.

        Returns:
            The mean loss and the metrics over the samples of these batches on all ranks, and `samples`, the number of these.
        """
        with together(self, "evaluate_steps"):
            if steps is not None and steps < 1:
                raise ValueError(
                    f"Expected steps to be at least 1, or None. Received: steps={steps!r}."
                )
            if steps is None:
                steps = max((self.steps or 0) // 20, 1)
            return self._parts.evaluator.evaluate(split, steps)

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients.

        Called by a user, it runs as in an evaluation: on the unwrapped model in evaluation mode, with the EMA weights if there are any; the
        random streams of training are restored.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        forward = self._parts.evaluator.forward
        if self.mode != "train" or self._parts.session.in_step:
            return forward.evaluate(data)
        returned: tuple[Any, Tensor | None] = prepared(
            self, "evaluate_step", forward.evaluate, data
        )
        return returned

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the metrics of an evaluation; override it to add metrics that are not a mean, such as a perplexity.

        Each metric is a number, or a tensor with one element. `super().summarize(split, totals)` returns means over all ranks, from which
        others can be computed: `result["perplexity"] = math.exp(result["loss"])`.

        Args:
            split: The split that was evaluated.
            totals: Sums and weights of this rank.
        """
        return totals.averages(self.placement.metrics) | self._parts.metrics.compute(
            self.placement.metrics
        )

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[False] = False) -> list[Any]: ...

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[True]) -> Iterator[Any]: ...

    def infer(self, split: str | None = None, *, stream: bool = False) -> list[Any] | Iterator[Any]:
        """Predict every sample of a split.

        Args:
            split: The split; `None` is the first one named for inference, else the first one to evaluate.
            stream: Yield the predictions of this rank's share one by one, instead of gathering all.

        Returns:
            The predictions in the order of the dataset, the same on all ranks: a list of tensors on the CPU, or of plain values
            where a prediction is a single number. With `stream`, a generator.

            What `infer_step` returns is split by sample: a tensor along its first dimension; a list by its items; a tuple of these
            (several outputs of a model) into a tuple per sample; a mapping into a mapping per sample, with those entries that have as
            many items as the batch has samples, which a `loss` has not. Anything else is one item for the whole batch.
        """
        with together(self, "infer"):
            chosen = self._parts.data.choose(
                split, self._parts.data.to_infer(self.evaluate_splits), "infer"
            )[0]
            evaluator = self._parts.evaluator
            if not stream:
                return evaluator.infer(chosen)
            return (
                prediction for batch in evaluator.stream_batches(chosen) for prediction in batch
            )

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; its target, if any, is ignored.

        Called by a user, it runs as in `infer`, in evaluation mode without gradients.

        Returns:
            A tensor, list, tuple or mapping with an entry per sample, which `infer` splits.
        """
        forward = self._parts.evaluator.forward
        if self.mode != "train" or self._parts.session.in_step:
            return forward.infer(data)
        return prepared(self, "infer_step", forward.infer, data)

    # Save and restore

    def build_model_states(self) -> ModelStates:
        """Return how the states of model, EMA and optimizer are read and loaded; a stack that divides them overrides this."""
        return ModelStates(self)

    def state_dict(self) -> dict[str, Any]:
        self._parts.update.warn_of_open()
        return super().state_dict()

    def component_parts(self) -> list[StatePart]:
        """Return model, criterion, EMA, optimizer and scheduler, in the order in which they are restored."""
        return component_parts(self, self._parts.frozen, self._parts.asked_options)

    def progress_parts(self) -> list[StatePart]:
        parts = self._parts
        own = progress_parts(
            self,
            parts.results,
            parts.loss,
            parts.losses,
            parts.metrics,
            parts.train_metrics,
            parts.phases,
            parts.extensions,
        )
        settings = [parts.pass_settings.part(), parts.asked_options.part(), parts.unsaved.part()]
        return [*super().progress_parts(), *own, *settings]

    def model_state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of the unwrapped model, by name without wrapper prefixes."""
        return self.model_states.model_state()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name."""
        return self.model_states.optimizer_state()

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        template = self.model_states.template()
        if template is None:
            return super().read_checkpoint(checkpoint)
        template["model"] = self.model_state_dict()
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(
            checkpoint, template=template
        )
        return payload

    def load_components(self, payload: Mapping[str, object], excluded: set[str]) -> None:
        """Restore model, criterion, EMA, optimizer and scheduler, in this order.

        Args:
            payload: The payload of a checkpoint without the excluded parts.
            excluded: The dotted paths of these parts.
        """
        # Those of the program, before the restore replaces them.
        options = options_of(self.optimizer) if self.optimizer is not None else []
        progress: Any = payload.get("state") or {}
        with self._parts.asked_options.compared_with(progress.get("asked_options", {})):
            self.run_state.load_components(payload, excluded)
        if self.ema is not None and "ema" not in payload:
            # The averages began from the weights before the restore: they begin again from the restored ones.
            self.ema.reset()
        begins = {"optimizer", "optimizer.param_groups"} & excluded
        if self.optimizer is not None and begins and "scheduler" in payload:
            # The rates are the program's, where the schedule is.
            put_rates_of(self.scheduler)
            adopt_options(self.optimizer, self.scheduler, options, lambda name: name == "lr")
        if self.optimizer is not None and "optimizer" in payload:
            allows = self.run_state.excluded.allows_setting
            if self.scheduler is not None:
                put_beginning_of_schedule(self.optimizer, self.scheduler, options, excluded)
            adopt_options(
                self.optimizer,
                self.scheduler,
                options,
                lambda name: allows(f"optim.{name}") or allows("optim.param_groups"),
            )

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights into the unwrapped model, by name without wrapper prefixes.

        Args:
            state: Tensors by name.
            partial: Allow names that were excluded from loading to be missing.
        """
        self.model_states.load_model(state, partial=partial)

    def load_ema(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Restore the EMA of the weights.

        Args:
            state: What `EMA.state_dict` returned: `weights` by name without wrapper prefixes, and `num_updates`.
            partial: Start the average of missing weights from the model's, instead of refusing.
        """
        self.model_states.load_ema(state, partial=partial)

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name.

        Args:
            state: `state` by parameter name, and `param_groups` with parameter names.
        """
        self.model_states.load_optimizer(state)

    def load_scheduler(self, state: Mapping[str, object]) -> None:
        """Restore the scheduler.

        Args:
            state: What the schedule's `state_dict` returned.
        """
        load_schedule(self.scheduler, state, kind=self._parts.asked_options.kind)

    def load_pretrained(self, checkpoint: str | Path | Mapping[str, Any]) -> None:
        """Load only the weights of the model; everything else starts from the beginning.

        Where there are averaged weights, these are loaded, since they were evaluated; with `pretrained_averages=false` the trained ones.

        Args:
            checkpoint: A checkpoint of this library, a file with a plain `state_dict`, or weights by name, also as `{"model": weights}`.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If names or shapes are not those of the model; `checkpoint.exclude_from_loading` leaves some out.
        """
        # Also where a resume reads the weights that its run began from: what the run has trained since is not in them.
        with together(self, "load_pretrained"), self.run_state.loading({}) as left_out:
            weights = read_model(
                self.checkpoint_manager, checkpoint, averages=self.config.pretrained_averages
            )
            # Other exclusions would match nothing in the weights, which is an error.
            entries = left_out.parts_of("model")
            payload, excluded = exclude(
                {"model": weights}, entries, here=self.run_state.weight_paths()
            )
            ties = untied(self.unwrapped_model, payload["model"])
            self.load_model(payload["model"], partial=bool(excluded))
            if self.is_main_process:
                for sentence in ties:
                    logger.warning("%s", sentence)
            if self.ema is not None:
                # As after a restore.
                self.ema.reset()
            source = "a mapping" if isinstance(checkpoint, Mapping) else checkpoint
            logger.info("Loaded the weights of %s.", source)
