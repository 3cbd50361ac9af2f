"""The runner for one process or several copies of a model: construction, loops, one update, evaluation, and what is saved."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.checkpoints import FileCheckpointManager, exclude, read_model
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.config.effects import endless_streams, idle_settings
from danling.data import Batch, derive_seed, move_to_device
from danling.distributed import StepSync, StepTotals
from danling.metrics import Meters, MetricSet
from danling.optim.building import build_optimizer, build_scheduler, check_metric_of_schedule, scheduler_interval
from danling.optim.options import adopt_options, options_of
from danling.reporting import device_peak_flops, speaking_for
from danling.reporting.run_report import RunReport
from danling.supervision import Profiler, is_out_of_memory
from danling.torchft import Healing, ReplicaGroups, ReplicaMember, ReplicaSettings, position_owner
from danling.training import (
    EMA,
    UNCOMMITTED,
    BatchWeights,
    Compilation,
    Coverage,
    DDPReduction,
    GradientReduction,
    LocalReduction,
    MemoryRetry,
    PassAgreement,
    Precision,
    UpdateOutcome,
    Window,
    call_model,
    count_tokens,
    criterion_loss,
    criterion_setting,
    criterion_weight,
    is_pair,
    prediction_of,
    ungraded,
    unpack_batch,
    updates_of_pass,
)
from danling.training.component_checks import (
    check_criterion,
    check_mapping,
    check_metrics,
    check_model,
    check_optimizer,
    check_passes,
    check_scheduler,
    misnamed_overrides,
    warn_of,
)
from danling.training.component_parts import component_parts
from danling.training.coverage import ungraded_names
from danling.training.decision import UpdateDecision
from danling.training.ending import TrainingEnd
from danling.training.evaluator import EvaluationMode
from danling.training.forward import EvaluationForward
from danling.training.gradients import normalization_statistics
from danling.training.loop import TrainingLoop
from danling.training.micro_batches import MicroBatches, WindowForwards
from danling.training.model_states import ModelStates, weights_to_export
from danling.training.outcome import count_skip, no_gradient
from danling.training.preparation import ModelPreparation
from danling.training.results import RunResults
from danling.training.rollback import buffers_of, remember_forwards
from danling.training.run_state import StatePart
from danling.utils.names import canonical_name

from . import assembly
from .base_runner import RESERVED_FIGURES, BaseRunner, Results
from .meta import check_settings_are_read

logger = logging.getLogger("danling")


def takes_closure(optimizer: Any) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as that of LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


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
    memory_retry: MemoryRetry | None = None
    """Makes an update again when memory ran out, with `dataloader.micro_batch_size="auto"`."""
    compilation: Compilation | None = None
    """What was compiled; `None` unless `compile.enable`."""
    fault_tolerance: ReplicaMember | None = None
    """This process's replica group among the others; `None` unless `ft.enabled`."""

    # Made after the user's `__init__`; annotated here, as every name that a user may not take.
    precision: Precision
    window: Window
    step_sync: StepSync
    metric_set: MetricSet
    preparation: ModelPreparation
    _batch_weights: BatchWeights
    _results: RunResults

    _said_coverage: bool = False
    _looked: bool = False
    """Whether the gradients of the first update were looked at."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.model_states: ModelStates = self.build_model_states()
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode; weighted over all ranks."""
        self._batch_weights = assembly.batch_weights(self)
        self._batch_loss = assembly.batch_loss(self)
        self._evaluator = assembly.evaluator(self)
        # First of all: what an update left to be checked must not be saved.
        self.saver.before.insert(0, lambda: self.raise_pending_error())
        self._samples_on_device: Tensor | None = None
        self._log_every = 1024
        self._steps_scheduler = False
        self._rates: list[float] = []
        """Learning rates of the update that is logged next: those it was made with."""
        self.saver.around = partial(assembly.save_aside, self)
        self._results = assembly.run_results(self)

    # Construction, after the `__init__` of the user

    def prepare_components(self) -> None:
        """Move and wrap the model, build optimizer, scheduler and loaders. Called on all ranks.

        Bad input is refused before the first file is written.
        """
        self.preparation = self.build_preparation()
        self._check_components()
        self.init_fault_tolerance()
        self.precision = Precision(self.config.precision, self.device)
        self.window = Window(self.placement.optimizer, self.device)
        counts = (self.placement.counts_loss, self.placement.counts_samples)
        self.step_sync = StepSync(self.placement.optimizer, self.device, reports=counts)
        self.memory_retry = self._build_memory_retry()
        self.materialize_model()
        self._check_wrapped()
        self._build_if_absent()
        self._open_sources()
        self.metric_set = MetricSet.wrap(self.metrics, domain=self.placement.metrics, device=self.device)

    def __post_init__(self) -> None:
        """Finish what `__init__` has set up, restore the checkpoint, and look for settings without an effect. Called on all ranks."""
        super().__post_init__()
        self.preparation.note_constructed(self.model)
        self._check_effects()

    def _build_memory_retry(self) -> MemoryRetry | None:
        if not self.update_plan.finds_micro_batch_size:
            return None
        reason = self.preparation.forward_communicates(self.unwrapped_model)
        if reason is not None:
            raise ValueError(
                "Expected dataloader.micro_batch_size to be a number where forward or backward communicate: a rank that is out of memory "
                f"would leave the others waiting. Received: dataloader.micro_batch_size='auto' with {reason}. Set the most samples that "
                "fit a rank."
            )
        return MemoryRetry(self.placement.optimizer, self.device, is_out_of_memory)

    def build_preparation(self) -> ModelPreparation:
        """Return how the stack prepares the model: what wraps it, and where its weights are whole. Called on all ranks."""
        return ModelPreparation(self.world)

    def _check_wrapped(self) -> None:
        if self.stack == "ddp":
            trains = any(parameter.requires_grad for _, parameter in self.named_parameters())
            own = any(self._overrides(hook) for hook in ("build_reduction", "complete_gradients", "unscale_gradients"))
            self.preparation.check_reduced(self.model, trains=trains, reduced_by_user=own)

    def _check_effects(self) -> None:
        """Refuse a scheduler that nothing would advance, and warn of settings that nothing reads. Called on all ranks."""
        self.check_scheduler(evaluates=bool(self.evaluate_splits))
        if self.is_main_process:
            warn_of(self.idle_settings)

    def check_scheduler(self, *, evaluates: bool) -> None:
        """Refuse a schedule that goes by a figure which nobody makes. No communication: may be called on one rank.

        Args:
            evaluates: Whether the run evaluates anything.

        Raises:
            ValueError: If it is such a one.
        """
        monitors = "monitor" in self.config.get("scheduler", {})
        check_metric_of_schedule(
            self.scheduler, interval=self.scheduler_interval(), evaluates=evaluates, monitors=monitors
        )

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that has no effect in this run.

        No communication: may be called on one rank.
        """
        config = self.config
        built = [self.sources[split] for split in self.datasets if split in self.sources]
        return [
            *idle_settings(
                config,
                evaluates=bool(self.evaluate_splits),
                step_mode=self.is_step_mode,
                positioned=all(source.kind in ("position", "sampled") for source in built),
                writes_files=isinstance(self.checkpoint_manager, FileCheckpointManager),
                divides_updates=not self.train_splits or any(self.update_plan.division(s) for s in self.train_splits),
            ),
            *self.preparation.unused_settings(),
            *([] if self.is_step_mode else endless_streams(self.train_splits, self._splits.lengths or {})),
            *misnamed_overrides(type(self), vars(self), self._unset()),
        ]

    def _unset(self) -> list[str]:
        """Return the components that neither the user nor the configuration has given."""
        own_loss = self._overrides("compute_loss") or self._overrides("train_step")
        has_data = bool(self.datasets or self.dataloaders)
        given = {
            "criterion": self.criterion is not None or own_loss,
            "optimizer": self.optimizer is not None,
            "scheduler": self.scheduler is not None,
            "datasets": has_data,
            "dataloaders": has_data,
        }
        return [name for name, is_there in given.items() if not is_there]

    def _check_components(self) -> None:
        check_model(self.model, vars(self))
        check_criterion(self.criterion)
        check_scheduler(self.scheduler)
        check_metrics(self.metrics, RESERVED_FIGURES)
        check_mapping("datasets", self.datasets)
        check_mapping("dataloaders", self.dataloaders)
        check_passes({**self.datasets, **self.dataloaders}, self.epochs)
        check_optimizer(self.optimizer, self.named_parameters())

    def _build_if_absent(self) -> None:
        if self.optimizer is None and (self.config.get("optim", None) or self._overrides("build_optimizer")):
            self.optimizer = self.build_optimizer()
        self.build_dataloaders()
        self._splits.agree_lengths(self.train_splits, self.placement.optimizer)
        self.bind_optimizer()
        asked = self.config.get("scheduler", None) or self._overrides("build_scheduler")
        if self.scheduler is None and self.optimizer is not None and asked:
            self.scheduler = self.build_scheduler()
        for optimizer in (self.optimizer, *getattr(self.optimizer, "optimizers", ())):
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._refuse_early_step)

    def _refuse_early_step(self, optimizer: Any, *_: Any) -> None:
        if self._session.in_step:
            raise RuntimeError(
                "Expected `train_step` to leave the update to the runner, which weighs, checks and clips the gradient. Received: a step of "
                f"{type(optimizer).__name__} inside of it. Remove optimizer.step(); an update of your own goes into `optimizer_step`."
            )

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
        self._wrap()

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

    def check_coverage(self) -> None:
        """Refuse an optimizer that trains nothing of the model, and name once what it leaves out. Call on all ranks.

        Raises:
            ValueError: If it trains nothing, or the model was replaced where more than the optimizer belongs to it.
        """
        kind = type(self.optimizer).__name__
        mine = Coverage.of(self.named_parameters(), self.optimized_parameters())
        whole = Coverage.joined(self.world.gather_objects(mine))
        whole.check(kind)
        if self.distributed or self.ema is not None or self.stack != "ddp":
            self.preparation.check_constructed(self.model)
        if self.is_main_process and not self._said_coverage:
            for message in whole.warnings(kind):
                logger.warning("%s", message)
        self._said_coverage = True

    def optimized_parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer updates of the model that the user made, and besides. May be called on one rank."""
        return self.preparation.optimized_parameters(self.optimizer)

    def rewrap_if_trainables_changed(self) -> None:
        """Wrap the model anew where other parameters are trained than when it was wrapped. Call on all ranks, between updates.

        DistributedDataParallel reduces what required a gradient at construction, and nothing else.
        """
        if self.preparation.trainables_changed(self.unwrapped_model):
            self.model = self.unwrap(self.model)
            self._wrap()
            self.preparation.note_constructed(self.model)

    def _wrap(self) -> None:
        # DistributedDataParallel reads the compiler's setting as well.
        with self.compilation.settings() if self.compilation is not None else nullcontext():
            self.model = self.wrap_model(self.model)
        self.preparation.note_wrapped(self.unwrapped_model)
        if isinstance(self.model, DistributedDataParallel):
            # As the wrapper does with the model's.
            for parameter in self._criterion_tensors("parameters"):
                self.world.broadcast(parameter.data)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model that training calls: DistributedDataParallel when there are several ranks. Call on all ranks.

        Args:
            model: The model, on its device.
        """
        several = self.distributed and any(parameter.requires_grad for parameter in model.parameters())
        options = self.ddp_kwargs() if several else {}
        return self.preparation.wrap(model, options, reduces_later=self.memory_retry is not None)

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

    def broadcast_buffers(self) -> None:
        """Give the ranks that share a part of the model the buffers of the first of them. Call on all ranks.

        DistributedDataParallel does it at the next training forward; until then those of the other ranks are their own.
        """
        self.preparation.broadcast_buffers(self.model, self._criterion_tensors("buffers"))

    def _criterion_tensors(self, kind: str) -> list[Tensor]:
        return list(getattr(self.criterion, kind)()) if isinstance(self.criterion, nn.Module) else []

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

    def scheduler_interval(self, name: str = "") -> str:
        """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`. No communication: may be called on one rank.

        Args:
            name: Type of a schedule that is not built yet.
        """
        settings = self.config.scheduler if "scheduler" in self.config else {}
        return scheduler_interval(settings, self.scheduler, name=name)

    def forward_context(self) -> Any:
        """Return the context of a forward: autocast of `config.precision`. Called on all ranks."""
        return self.precision.autocast()

    # Training

    @cached_property
    def _loop(self) -> TrainingLoop:
        return assembly.training_loop(self)

    @cached_property
    def _micro_batches(self) -> MicroBatches:
        return assembly.micro_batches(self)

    @cached_property
    def _forwards(self) -> WindowForwards:
        return assembly.window_forwards(self)

    @cached_property
    def _report(self) -> RunReport:
        return assembly.run_report(self)

    @cached_property
    def _end(self) -> TrainingEnd:
        return assembly.training_end(self)

    def train(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train to the end of the budget: by epochs when `epochs` is set, else by steps. Call on all ranks.

        A run that is at its end returns at once, before it touches data, and writes nothing.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`: figures by completed epoch or global step, then by split.

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
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        if self.is_step_mode:
            raise ValueError(
                f"Expected a budget of epochs for `train_epochs`. Received: steps={self.steps}. Call `train()` or `train_steps()`, or set "
                "`epochs` instead."
            )
        if self._loop.is_done():
            return self.results
        with self._training():
            if not self._results.open:
                self._try_evaluations(to_evaluate)
            self._loop.train_epochs(to_train, to_evaluate)
        return self.results

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train what is left of one pass over one split. Call on all ranks.

        What an override returns are the figures of the split. Called alone, it trains the next pass, and closes the epoch when every
        split to train on has had its pass: `epoch` is counted, the figures go into `results`, a schedule by epochs advances. Evaluating and
        saving are left to the caller; a signal, `stop()` and `max_time` end it as they end `train`.

        Args:
            split: The split, of a dataset or a loader to train on.

        Returns:
            The weighted mean loss of the pass over all ranks, and what was put into `meters`; empty when it was stopped half-way.
        """
        return self._loop.train_epoch(split)

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
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        if not self.is_step_mode:
            raise ValueError(
                f"Expected a budget of steps for `train_steps`. Received: epochs={self.epochs}. Call `train()` or `train_epochs()`, or set "
                "`steps` instead."
            )
        if self._loop.is_done():
            return self.results
        with self._training():
            if not self._results.open:
                self._try_evaluations(to_evaluate)
            self._loop.train_steps(to_train, to_evaluate)
        return self.results

    def _check_ready(self, train_splits: Any, evaluate_splits: Any) -> tuple[list[str], list[str]]:
        self.check_trainable()
        if self.epochs is None and self.steps is None:
            raise ValueError(
                "Expected a budget: `steps` (optimizer updates) or `epochs`. Received: steps=None, epochs=None. Set one of them."
            )
        to_train = self._splits.choose(train_splits, self.train_splits, "train on")
        if not (self.evaluate_splits if evaluate_splits is None else evaluate_splits):
            self.check_scheduler(evaluates=False)
            return to_train, []
        return to_train, self._splits.choose(evaluate_splits, self.evaluate_splits, "evaluate")

    def check_trainable(self) -> None:
        """Refuse settings that nobody has read, and an optimizer that does not take the gradient as it is. Called on all ranks.

        Raises:
            ValueError: If there are such settings, or there is no such optimizer.
        """
        if self._closed:
            raise ValueError(
                "Expected a runner that is open. Received: train() after close(), or after its `with` block. Construct it anew; "
                "auto_resume goes on from its last checkpoint."
            )
        check_settings_are_read(type(self), self.config, self.world, made_of_mapping=self._made_of_mapping)
        self.check_optimizer_given()
        if takes_closure(self.optimizer):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {type(self.optimizer).__name__}, whose "
                "step calls a closure again and again. Override `step` and `optimizer_step` for it, or choose another."
            )
        self.check_coverage()

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """Return the outcomes of the updates of what is left of the pass over `split`, which are made as they are asked for."""
        source, forwards, reporter = self.source(split), self._forwards, self._reporter
        self.bind_reduction()
        return updates_of_pass(
            source,
            agreement=forwards.agreement,
            timed=reporter.timed,
            state_replaced=self._takes_state_over if self.fault_tolerance is not None else None,
            is_over=partial(self._loop.jumps_out_of, split),
            run=partial(forwards.run, source),
            step=self.step,
        )

    def build_agreement(self) -> PassAgreement:
        """Return what keeps the ranks together in their passes; a stack whose ranks read the same data brings its own."""
        return PassAgreement(self.placement.optimizer, self.data_domain)

    def _takes_state_over(self) -> bool:
        """Agree with the other replica groups on the next update; tell whether the state is that of another group now."""
        if self.fault_tolerance is None or not self.fault_tolerance.open_update():
            return False
        self._reporter.forget_samples(self.state.train.samples)
        return True

    def _try_evaluations(self, splits: Sequence[str]) -> None:
        """Evaluate one batch of each split before the first update; evaluations of the user's own are left out."""
        verb = "evaluate_steps" if self.is_step_mode else "evaluate_epoch"
        if self.config.try_evaluation and not (self._overrides(verb) or self._overrides("evaluate")):
            self._evaluator.try_once(splits, self._results.judge_trial)

    @contextmanager
    def _training(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: what is logged meanwhile is of this run, signals are watched, and the end is saved.

        Args:
            whole: Whether the run ends here; a verb that was called alone saves only where it was asked to stop.
        """
        session = self._session
        with speaking_for(self._run_log), session.collecting():
            self.begin_updates()
            self.model.train()
            session.begin(max_seconds=self.config.max_time_seconds())
            self._loop.boundaries = assembly.boundaries(self)
            self.open_trackers()
            self.init_signal_handlers()
            assembly.begin_report(self)
            opened = session.opened(self._end.of_session(), domain=self.placement.optimizer, whole=whole)
            with self._evaluator.evaluation.watched(self._between_batches), opened:
                yield

    def _between_batches(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; in training, all ranks agree before each one whether to go on."""
        return assembly.between_batches(self, split, batches) if self._session.running else batches

    def _called_alone(self, verb: str) -> bool:
        """Whether no loop has called one of the verbs of `danling.runners.alone`."""
        if verb == "train_epoch":
            return not self._session.running
        return not self._session.in_step and (verb == "train_step" or self.mode == "train")

    def _alone_train_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        self.prepare_updates()
        return self._micro_batches.run_alone(call, data)

    def _alone_train_epoch(self, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
        self.check_trainable()
        self._splits.check(split)
        self._splits.agree_lengths(self.train_splits, self.placement.optimizer)
        with self._training(whole=False):
            return self._loop.train_epoch_alone(split, partial(call, split, *args, **kwargs), self.train_splits)

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._session.request("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._session.request("save")

    def count_tokens(self, data: Any) -> float:
        """Return the tokens of a batch for the figures of speed, 0 for data that has none; override it for batches of your own.

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
        return assembly.profiler(self)

    def write_results(self) -> None:
        """Write the figures of the run, its last ones and its best ones, on the main process."""
        if self.is_main_process:
            weights = "trained" if self.ema is None else "averaged"
            latest = {"index": self.index, "weights": weights, "result": self.latest_result}
            best = {"index": self.best_index, "weights": weights, "score": self.best_score, "result": self.best_result}
            is_here = self.best_index is None or self.best_index != self.saver.best_elsewhere
            self.workspace.write_results(self.results, latest, best if is_here else None)

    # One update

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

    def _look_at_first_update(self) -> None:
        """Name what is trained and got no gradient, and let all ranks weigh alike where a model returns its loss."""
        self._looked = True
        mine = self.reduction.without_gradient({id(parameter) for parameter in self.optimized_parameters()})
        trained = (name for name, parameter in self.named_parameters() if parameter.requires_grad)
        names = ungraded_names(mine, trained, self.world)
        if names and self.is_main_process:
            logger.warning("%s", ungraded(names))
        self._batch_loss.agree(self.world.gather_objects)

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
            unreduced=self._unreduced,
        )

    def _unreduced(self) -> list[Tensor]:
        # DistributedDataParallel has reduced nothing where memory may run out in the backward, and never the criterion's.
        if self.memory_retry is None:
            return self._criterion_tensors("parameters")
        return [parameter for _, parameter in self.named_parameters()]

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

        The default counts the targets that the criterion does not ignore, see `danling.training.criterion_weight`; where the model
        computes the loss itself, the labels that it counts, see `danling.training.model_weight`; else samples. Called on every rank
        for every batch, before its forward.

        Args:
            data: The batch, on the device.
            target: Its target, `None` without one.

        Returns:
            A float, or a 0-dim tensor on the device that need not be waited for.
        """
        if self.criterion is None and not self._batch_loss.own_loss:
            return self._batch_loss.weight(data, target)
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
        return self._batch_loss.of_model(pred, target, training=self.mode == "train")

    def evaluated_loss(self, pred: Any, target: Any) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none. Called on all ranks.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.

        Args:
            pred: What the model returned, any type.
            target: The target of the batch, `None` without one.
        """
        return self._batch_loss.of_evaluated(pred, target)

    @property
    def sums_loss(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return bool(criterion_setting(self.criterion, "reduction") == "sum")

    def evaluate(self, splits: str | Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Evaluate whole splits. Call on all ranks.

        Args:
            splits: One split or several; `None` is `evaluate_splits`.

        Returns:
            Figures by split, the same on all ranks.

        Raises:
            ValueError: If a split is unknown, or there is none.
        """
        names = self._splits.choose(splits, self.evaluate_splits, "evaluate")
        return {split: self.evaluate_epoch(split) for split in names}

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        """Evaluate all of one split. Call on all ranks.

        Args:
            split: The split.

        Returns:
            The mean loss and the metrics over every sample of every rank, each counted once; empty when there is none.
        """
        return self._evaluator.evaluate(split, None)

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
        return self._evaluator.evaluate(split, steps if steps is not None else max((self.steps or 0) // 20, 1))

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients. Called on all ranks.

        Called alone, it is made as in an evaluation: on the bare model in evaluation mode, with averaged weights where there are any, and
        training's random streams are left as they were.

        Args:
            data: The batch; within an evaluation it is on the device.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        return self._evaluator.forward.evaluate(data)

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the figures of an evaluation; override to add those that are no mean, such as a perplexity.

        Call on all ranks. Each figure is a number, or a tensor of one. `super().summarize(split, totals)` returns means over all
        ranks, from which others follow:
        `result["perplexity"] = math.exp(result["loss"])`.

        Args:
            split: The split that was evaluated.
            totals: Sums and weights of this rank.
        """
        result, metrics = totals.averages(self.placement.metrics), self.metric_set.compute(self.placement.metrics)
        check_metrics(metrics, RESERVED_FIGURES)
        return result | metrics

    @contextmanager
    def _in_mode(self, mode: Literal["evaluate", "infer"], model: Any) -> Iterator[None]:
        """Stand in another mode than training inside, with the model that is called there."""
        before = self.model, self.mode
        self.model, self.mode = model, mode
        try:
            yield
        finally:
            self.model, self.mode = before

    @contextmanager
    def _evaluating(self, split: str, mode: EvaluationMode) -> Iterator[None]:
        """Evaluation mode on the bare model, with averaged weights where there are any and streams of its own."""
        evaluation, preparation, bare = self._evaluator.evaluation, self.preparation, self.unwrap(self.model)
        if self.ema is not None:
            evaluation.announce_averaged(getattr(self.ema, "decay", None))
        evaluating = evaluation.mode(
            self.model,
            bare,
            seed=derive_seed(self.seed, mode, split, self.placement.stream_index),
            equalize=self.broadcast_buffers,
            averaged=partial(preparation.averaged, self.ema) if self.ema is not None else None,
        )
        with preparation.evaluating(self.model), self._session.collecting(), evaluating, self._in_mode(mode, bare):
            yield

    def _alone_evaluate_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        return self._evaluator.alone("evaluate", call, data)

    def _alone_infer_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        return self._evaluator.alone("infer", call, data)

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
        chosen = self._splits.choose(split, self._splits.to_infer(self.evaluate_splits), "infer")[0]
        return self._evaluator.stream(chosen) if stream else self._evaluator.infer(chosen)

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; a target that comes with it is left aside. Called on all ranks.

        Called alone, it is made as in `infer`, without gradients.

        Args:
            data: The batch; within `infer` it is on the device.

        Returns:
            A tensor, list, tuple or mapping with an entry for each sample, as `infer` takes them apart.
        """
        return self._evaluator.forward.infer(data)

    # What is saved and restored

    def build_model_states(self) -> ModelStates:
        """Return how the states of model, averages and optimizer are read and put back; a stack that divides them brings its own."""
        return ModelStates(
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            optimizer=lambda: self.optimizer,
            ema=lambda: self.ema,
        )

    def meter_totals(self) -> dict[str, tuple[float, float]]:
        """Return sums and weights of `meters` over all ranks, and over the replica groups that take part. Call on all ranks."""
        totals = self.meters.totals(self.placement.metrics)
        return totals if self.fault_tolerance is None else self.fault_tolerance.sum_totals(totals)

    def component_parts(self) -> list[StatePart]:
        """Return model, criterion, averages, optimizer and scheduler, in the order in which they are restored."""
        return component_parts(self)

    def progress_parts(self) -> list[StatePart]:
        """Return what lies in the entry `state` of a checkpoint, in the order in which it is restored."""
        return [
            *super().progress_parts(),
            StatePart(
                "train",
                lambda: {**asdict(self.state.train), "weight_reference": self.window.agreed_reference},
                lambda stored, _: self._load_counters(stored),
            ),
            StatePart(
                "open_result",
                lambda: dict(self._results.open),
                lambda stored, _: self._results.reopen(stored),
                default=dict,
            ),
            StatePart(
                "bare",
                lambda: self._batch_weights.targetless,
                lambda known, _: setattr(self._batch_weights, "targetless", known),
                default=lambda: None,
            ),
            StatePart(
                "meters",
                lambda: self.meters.state_dict(),
                # Sums over all ranks were saved: one of those that add up takes them over.
                lambda sums, _: self.meters.load_state_dict(sums if self.placement.metrics.rank == 0 else {}),
                default=dict,
            ),
            StatePart.stateful("losses", lambda: self.losses, resets=True),
            StatePart.stateful("scores", lambda: self.standing.board),
            StatePart.stateful("scaler", lambda: self.precision.scaler),
        ]

    def _load_counters(self, stored: Mapping[str, Any]) -> None:
        self.state.load_train(stored)
        self.window.agreed_reference = self.state.train.weight_reference

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

    @property
    def _is_state_of_best(self) -> bool:
        return self._results.scored_at == self.state.train.global_step and super()._is_state_of_best

    def export_model(self) -> None:
        """Write the weights, and the averaged ones, as `model`, cast to `checkpoint.export_dtype`. Call on all ranks."""
        dtype, config = self.config.checkpoint.export_dtype, self.config.public()
        self.saver.export(
            lambda: weights_to_export(config, self.model_state_dict(), self.ema, dtype=dtype, version=FORMAT_VERSION)
        )

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a payload: components, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        super().load_state_dict(self.model_states.opened(state, self.run_state.excluded))

    def load_components(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        """Restore model, criterion, averages, optimizer and scheduler, in this order. Called on all ranks.

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

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Load model weights by canonical name into the bare model. Called on all ranks.

        Args:
            state: Tensors by name.
            partial: Allow names that were excluded from loading to be missing.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model.
        """
        self.model_states.load_model(state, partial=partial)

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights. Called on all ranks.

        Args:
            state: What the averages' `state_dict` returned: `weights` by canonical name, and `num_updates`.
            partial: Begin the average of weights that are missing at the model's, instead of refusing.

        Raises:
            CheckpointMismatch: If names are not those of the model.
        """
        self.model_states.load_ema(state, partial=partial)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks.

        Args:
            state: `state` by parameter name, and `param_groups` with parameter names.
        """
        self.model_states.load_optimizer(state)

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
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
