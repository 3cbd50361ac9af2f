"""Construction of a torch runner: devices, wrappers, optimizer, scheduler, loaders, trackers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.checkpoints import FileCheckpointManager
from danling.config.effects import endless_streams, idle_settings
from danling.distributed import StepSync
from danling.metrics import MetricSet
from danling.optim.building import build_optimizer, build_scheduler, check_metric_of_schedule, scheduler_interval
from danling.supervision import is_out_of_memory
from danling.training import EMA, Compilation, Coverage, MemoryRetry, Precision, Window
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
from danling.training.preparation import ModelPreparation
from danling.utils.names import canonical_name

from .base_runner import RESERVED_FIGURES, BaseRunner

logger = logging.getLogger("danling")


class TorchComponents(BaseRunner):
    """Turns what the user put on the runner into what training needs."""

    stack = "ddp"

    # Made after the user's `__init__`; annotated here, as every name that a user may not take.
    precision: Precision
    window: Window
    step_sync: StepSync
    metric_set: MetricSet

    preparation: ModelPreparation

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
        # Registered last, so that it is the first thing that `close` does.
        self._check_effects()

    memory_retry: MemoryRetry | None = None
    """Makes an update again when memory ran out, with `dataloader.micro_batch_size="auto"`."""

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

    # Model

    def materialize_model(self) -> None:
        """Move model and criterion to the device, average, compile and wrap the model. Call on all ranks."""
        self.model.to(self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(self.device)
        self._build_ema()
        self.compile_modules([self.model])
        self._wrap()
        self.preparation.note_wrapped(self.unwrapped_model)
        if isinstance(self.model, DistributedDataParallel):
            # As the wrapper does with the model's.
            for parameter in self._criterion_tensors("parameters"):
                self.world.broadcast(parameter.data)

    def _build_ema(self) -> None:
        settings = {key: value for key, value in self.config.ema.items() if key != "enabled"}
        if self.config.ema.enabled and self.ema is None:
            self.ema = EMA(self.model, **settings)

    compilation: Compilation | None = None
    """What was compiled; `None` unless `compile.enable`."""

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

    _said_coverage: bool = False

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
            self.preparation.note_wrapped(self.unwrapped_model)

    def _wrap(self) -> None:
        # DistributedDataParallel reads the compiler's setting as well.
        with self.compilation.settings() if self.compilation is not None else nullcontext():
            self.model = self.wrap_model(self.model)

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

    def close(self) -> None:
        """Finish background work, release what the runner opened, and leave the user's module on `model`; a second call does nothing.

        Raises:
            Exception: What a background writer had to report. Everything is closed all the same.
        """
        if not self._closed and self.model is not None:
            self.model = self.unwrap(self.model)
        super().close()

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

    # Optimizer and scheduler

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

    # Contexts

    def forward_context(self) -> Any:
        """Return the context of a forward: autocast of `config.precision`. Called on all ranks."""
        return self.precision.autocast()
