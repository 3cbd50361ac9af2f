"""Checks the components that users set on a runner, before a run trains and while it trains."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from danling.config.names import ATTRIBUTES_ELSEWHERE, METHODS_ELSEWHERE, closest_typo
from danling.metrics.collection import metrics_by_name
from danling.optim import JointScheduler, needs_metric
from danling.optim.registry import OneCycleSchedule, check_metric_of_schedule, is_stuck
from danling.optim.state import modal, rates_of
from danling.optim.warmup import WarmupScheduler
from danling.utils.hooks import is_overridden
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name

from .batches import criterion_setting, smooths_without_weight
from .outcome import NonFiniteError
from .schedule import interval_of, score_path

if TYPE_CHECKING:
    from danling.data.run_data import RunData
    from danling.distributed import StepTotals
    from danling.metrics import MetricSet
    from danling.runners.torch_runner import TorchRunner

    from .session import TrainingSession

logger = logging.getLogger("danling")

_COLLAPSED = 1e-6
"""Share of its highest value below which a learning rate trains nothing."""

_MOST_ITEMS = 256
"""Items of a list or dictionary of the program in which modules are looked for."""

_UNSCALING = (
    "backward",
    "step",
    "complete_gradients",
    "unscale_gradients",
    "clip_gradients",
    "optimizer_step",
    "train_steps",
    "train_epoch",
)
"""Methods other than `train_step` in which a program can unscale gradients."""

_ASSIGNED = ("model", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics")


# Components, before anything is made of them


def check_components(runner: TorchRunner) -> None:
    """Refuse components of the wrong kind."""
    model, criterion, optimizer = runner.model, runner.criterion, runner.optimizer
    if not isinstance(model, nn.Module):
        made = " Make an instance of it." if isinstance(model, type) else ""
        raise ValueError(
            f"Expected `self.model` to be a torch.nn.Module when __init__ ends. Received: model={model!r} ({type(model).__name__})."
            f"{made or ' Assign it after super().__init__(config).'}{_did_you_mean('model', vars(runner))}"
        )
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"Expected a model whose weights are made. Received: {lazy!r} of a lazy layer, which is made by the first batch. Call the "
            "model once in __init__, such as self.model(torch.zeros(1, 3, 32, 32)), or give the layer its sizes."
        )
    if isinstance(criterion, type) or not (criterion is None or callable(criterion)):
        made = (
            f" Write {criterion.__name__}()." if isinstance(criterion, type) else " Assign a loss module or a function."
        )
        raise ValueError(
            f"Expected `self.criterion` to be a callable (pred, target) -> loss. Received: criterion={criterion!r}.{made}"
        )
    if smooths_without_weight(criterion):
        raise ValueError(
            "Expected class weights above 0 with label_smoothing: torch divides the smoothed loss by the weight of the targets, so that "
            f"that of a micro-batch with targets of weight 0 alone is infinite. Received: criterion={criterion!r} with "
            f"weight={criterion_setting(criterion, 'weight')!r}. Give these classes a small weight, such as 1e-6; or use "
            "reduction='sum'; or ignore_index, which leaves out their samples."
        )
    check_kinds(runner)
    if optimizer is not None:
        trained = {id(parameter) for _, parameter in runner.named_parameters() if parameter.requires_grad}
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained and not trained & optimized:
            raise ValueError(
                f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} over {len(optimized)} others, "
                "which would train nothing of it. Make it over self.model.parameters(), after the model is complete."
            )
    if runner.ema is not None and not callable(getattr(runner.ema, "applied", None)):
        raise ValueError(
            f"Expected `self.ema` to be averages, such as a danling.training.EMA. Received: ema of type {type(runner.ema).__name__}. Set "
            "ema.enabled=true, and the runner makes and updates the averages; give your own copy of the model another name."
        )
    for name in ("datasets", "dataloaders"):
        splits = getattr(runner, name)
        if not isinstance(splits, Mapping):
            raise ValueError(
                f"Expected `self.{name}` to be a mapping by split. Received: {name} of type {type(splits).__name__}. Write "
                f"self.{name} = {{'train': ..., 'val': ...}}."
            )
        for split, data in splits.items():
            if data is None or isinstance(data, (str, bytes, PathLike, type)):
                raise ValueError(
                    f"Expected `self.{name}[{split!r}]` to have samples. Received: {data!r}. Make a dataset of it, or leave the split out."
                )
            if name == "datasets" and isinstance(data, tuple) and len(data) > 1 and is_columns(data):
                raise ValueError(
                    f"Expected `self.datasets[{split!r}]` to have samples. Received: a tuple of {len(data)} tensors or arrays of "
                    f"{len(data[0])} rows each, which is a dataset of {len(data)} samples. Write TensorDataset(inputs, targets) with "
                    "tensors; where each tensor is a sample, put them into a list."
                )
            if isinstance(data, Iterator) and runner.epochs is not None and runner.epochs > 1:
                raise ValueError(
                    f"Expected a loader of split {split!r} that can be iterated again in each of {runner.epochs} epochs. Received: a "
                    f"{type(data).__name__}, which ends for good. Pass an iterable with __iter__, such as a DataLoader."
                )


def check_kinds(runner: TorchRunner) -> None:
    """Refuse an optimizer or a scheduler that is none, and a scheduler that no checkpoint can hold where some are saved."""
    optimizer, scheduler = runner.optimizer, runner.scheduler
    is_scheduler = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, type)
    if scheduler is not None and not is_scheduler:
        raise ValueError(
            f"Expected `self.scheduler` to be a scheduler with a method step(). Received: scheduler={scheduler!r}. Make one over "
            "self.optimizer, or name it in `scheduler.type` and let the runner build it."
        )
    missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))]
    if scheduler is not None and missing and not runner.config.checkpoint.load_only:
        raise ValueError(
            f"Expected `self.scheduler` to be a scheduler that a checkpoint can hold. Received: a {type(scheduler).__name__} without "
            f"{' and '.join(missing)}. Derive it from torch.optim.lr_scheduler.LRScheduler, or give it both: a dictionary of its numbers, "
            "and what puts them back."
        )
    if isinstance(optimizer, (list, tuple)):
        raise ValueError(
            f"Expected `self.optimizer` to be one optimizer. Received: a {type(optimizer).__name__} of {len(optimizer)}. Hold them "
            'together, danling.optim.JointOptimizer(first, second), or by name, {"first": first, "second": second}.'
        )
    is_optimizer = hasattr(optimizer, "param_groups") and not isinstance(optimizer, type)
    if optimizer is not None and not is_optimizer:
        raise ValueError(
            f"Expected `self.optimizer` to be a torch.optim.Optimizer. Received: optimizer={optimizer!r}. Make one over "
            "self.model.parameters(), or name it in `optim.type` and let the runner build it."
        )


def is_columns(data: tuple[object, ...]) -> bool:
    """Whether a tuple has the form (inputs, targets): tensors or arrays with one number of rows, and not all of one shape and dtype."""
    columns = [part for part in data if isinstance(part, Tensor) or type(part).__module__ == "numpy"]
    shapes = [tuple(getattr(part, "shape", ())) for part in columns]
    if len(columns) < len(data) or not all(shapes):
        return False
    kinds = {(shape, str(getattr(part, "dtype", None))) for shape, part in zip(shapes, columns)}
    return len({shape[0] for shape in shapes}) == 1 and len(kinds) > 1


def misnamed(runner: TorchRunner, built_optimizer: object, built_scheduler: object) -> list[str]:
    """Return a sentence for every method and attribute of the user's that looks like one of the library's and is not."""
    library, own = set[str](), set[str]()
    for kind in type(runner).__mro__:
        names = {
            name
            for name, value in vars(kind).items()
            if callable(value) and not (name.startswith("_") or isinstance(value, type))
        }
        if kind.__module__.startswith("danling."):
            library.update(names)
        else:
            own.update(names)
    has_data = bool(runner.datasets or runner.dataloaders)
    own_loss = is_overridden(runner, "compute_loss") or is_overridden(runner, "train_step")
    given = {
        "criterion": runner.criterion is not None or own_loss,
        "optimizer": runner.optimizer is not None,
        "scheduler": runner.scheduler is not None,
        "datasets": has_data,
        "dataloaders": has_data,
    }
    # A program that sets a component may call such a method of its own for it.
    set_by_program = {
        "build_optimizer": runner.optimizer is not None and runner.optimizer is not built_optimizer,
        "build_scheduler": runner.scheduler is not None and runner.scheduler is not built_scheduler,
        "self.metrics": runner.metrics is not None
        or is_overridden(runner, "summarize")
        or is_overridden(runner, "evaluate_step"),
        "self.datasets": has_data,
        "dataloader.collate_fn": not _collates_by_default(runner),
    }
    sentences = []
    for name in sorted(own - library):
        meant = METHODS_ELSEWHERE.get(name) or closest_typo(name, sorted(library))
        if meant is not None and meant not in own and not set_by_program.get(meant, False):
            sentences.append(f"The library does not call the method {name!r}: did you mean `{meant}`?")
    for name in ("collate_fn", "data_collator"):
        if callable(vars(runner).get(name)) and not set_by_program["dataloader.collate_fn"]:
            sentences.append(
                f"The library does not call `self.{name}`: did you mean `dataloader.collate_fn` of the configuration?"
            )
    for component in (name for name, is_given in given.items() if not is_given):
        hint = _did_you_mean(component, vars(runner))
        sentences += [f"`self.{component}` is not set.{hint}"] if hint else []
    return sentences


def _collates_by_default(runner: TorchRunner) -> bool:
    """Whether the library builds all loaders, and no setting says how samples are made into a batch."""
    has_own = bool(runner.dataloaders.keys() - runner.datasets.keys())
    builds = not (is_overridden(runner, "build_dataloader") or is_overridden(runner, "build_dataloaders"))
    if has_own or not runner.datasets or not builds:
        return False
    section = runner.config.get("dataloader", None) or {}
    sections = [section, *(value for value in section.values() if isinstance(value, Mapping))]
    return not any("collate_fn" in each for each in sections)


def _did_you_mean(component: str, present: Iterable[str]) -> str:
    for name in present:
        if name in _ASSIGNED or name == "mode" or name.startswith("_"):
            continue
        if ATTRIBUTES_ELSEWHERE.get(name) == component or closest_typo(name, [component]) == component:
            return f" You have set `self.{name}`: did you mean `self.{component}`?"
    return ""


def listed(names: Sequence[str]) -> str:
    """Return the first five names as text, with the total number if there are more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"


# Preparation


def check_settings(runner: TorchRunner) -> None:
    """Refuse settings that the stack cannot do. May be called on one rank."""
    config = runner.config
    in_pipeline = int(config.parallel.axes.pipeline) != 1 and runner.stack == "parallel"
    divides_names = in_pipeline or runner.stack == "deepspeed"
    if config.checkpoint.trainable_only and divides_names:
        received = "parallel.axes.pipeline above 1" if in_pipeline else "stack='deepspeed'"
        raise ValueError(
            "Expected a stack on which every rank knows all weights for checkpoint.trainable_only=true. Received: "
            f"{received}. Leave it out there; for adapters alone call `runner.save_pretrained(directory)`."
        )


def check_retries(runner: TorchRunner, *, finds_micro_batch_size: bool) -> None:
    """Refuse to look for the size of micro-batches where a rank that is out of memory would leave others waiting."""
    reason = runner.preparation.forward_communicates(runner.unwrapped_model) if finds_micro_batch_size else None
    if reason is not None:
        raise ValueError(
            "Expected dataloader.micro_batch_size to be a number where forward or backward communicate: a rank that is out of memory "
            f"would leave the others waiting. Received: dataloader.micro_batch_size='auto' with {reason}. Set the most samples that "
            "fit a rank."
        )


def check_reduced(runner: TorchRunner) -> None:
    """Refuse a model on the stack `ddp` whose gradients nothing would reduce over the ranks."""
    if runner.stack != "ddp":
        return
    trains = any(parameter.requires_grad for _, parameter in runner.named_parameters())
    hooks = ("build_reduction", "complete_gradients", "unscale_gradients")
    reduced_by_user = any(is_overridden(runner, hook) for hook in hooks)
    runner.preparation.check_reduced(runner.model, trains=trains, reduced_by_user=reduced_by_user)


def check_modes(runner: TorchRunner) -> None:
    """Refuse an optimizer that exchanges the weights between training and evaluation on a stack that cannot keep both."""
    if modal(runner.optimizer) and not runner.model_states.keeps_modes:
        raise ValueError(
            f"Expected an optimizer with one set of weights on the stack {runner.stack!r}. Received: a "
            f"{type(runner.optimizer).__name__}, whose train() and eval() exchange them. Train on 'ddp', or take another optimizer."
        )


# A run


class ComponentChecks(Observer):
    """Checks a run before it trains, and names once what its program changes while it trains without meaning to.

    It looks where passes, evaluations and saves are, never in an update but the first one.

    Attributes:
        built_scheduler: What `build_scheduler` of the runner returned.
    """

    def __init__(self, runner: TorchRunner, session: TrainingSession, data: RunData) -> None:
        self.built_scheduler: object = None
        self._runner = runner
        self._session = session
        self._data = data
        self._warned: set[str] = set()
        self._left_out: set[str] = set()
        self._groups = sys.maxsize
        self._highest_rate = 0.0
        self._times_low = 0

    def check_optimizer_given(self) -> None:
        """Refuse to train without an optimizer. May be called on one rank."""
        if self._runner.optimizer is None:
            built = "`build_optimizer` returned none. " if is_overridden(self._runner, "build_optimizer") else ""
            own = [name for name, value in vars(self._runner).items() if isinstance(value, torch.optim.Optimizer)]
            if len(own) > 1:
                entries = ", ".join(f"{name!r}: self.{name}" for name in own)
                raise ValueError(
                    f"Expected an optimizer. Received: optimizer=None, and optimizers in {listed([f'self.{name}' for name in own])}. Write "
                    f"self.optimizer = {{{entries}}} in __init__, and in train_step for each of them: with "
                    f"self.optimizing({own[0]!r}): self.backward(loss), which also makes the update."
                )
            own_one = f"You have set `self.{own[0]}`: did you mean `self.optimizer`? " if own else ""
            raise ValueError(
                f"Expected an optimizer. Received: optimizer=None. {built}{own_one}Assign `self.optimizer` in __init__, several by name "
                'as {"first": first, "second": second}, or set `optim.type`.'
            )

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not take the gradient as it is, or trains nothing of the model. Called on all ranks."""
        self.check_optimizer_given()
        run = self._runner
        kind = type(run.optimizer).__name__
        closure = inspect.signature(run.optimizer.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if needs_closure and not (is_overridden(run, "step") and is_overridden(run, "optimizer_step")):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {kind}, whose step calls a closure again and "
                "again. Override both `step` and `optimizer_step` for it, or choose another."
            )
        if any(is_stuck(member) for member in getattr(run.optimizer, "optimizers", [run.optimizer])):
            raise ValueError(
                "Expected an optimizer that moves the weights. Received: SGD(fused=True) over bfloat16 or float16 weights on the CPU, "
                "of which torch's fused form moves only those that do not fill a vector register. Set fused=False."
            )
        optimized = {id(parameter): parameter for parameter in run.preparation.optimized_parameters(run.optimizer)}
        named = dict(run.named_parameters())
        left_out = [name for name, p in named.items() if p.requires_grad and id(p) not in optimized]
        known = {id(parameter) for parameter in named.values()}
        foreign = [tuple(parameter.shape) for key, parameter in optimized.items() if key not in known]
        trains = any(p.requires_grad and id(p) in optimized for p in named.values())
        # Each rank may have a part of the model.
        ranks = run.world.gather_objects((trains, left_out, foreign))
        left_out = list(dict.fromkeys(name for _, names, _ in ranks for name in names))
        foreign = max((shapes for _, _, shapes in ranks), key=len)
        if left_out and not any(trains for trains, _, _ in ranks):
            raise ValueError(
                f"Expected an optimizer over parameters of the model. Received: a {kind} over {len(foreign)} others, which would "
                f"train nothing of it ({listed(left_out)}). A model that is put on the runner after construction is not the one "
                "that the optimizer was made for: assign `self.model` in __init__, and make the optimizer after the model is complete."
            )
        if run.distributed or run.stack != "ddp" or run.ema is not None:
            run.preparation.check_constructed(run.model)
        self._warn_of_left_out(left_out)
        if foreign:
            self._warn(
                "foreign",
                f"Expected an optimizer over parameters of the model and the criterion. Received: a {kind} with {len(foreign)} others "
                f"of the shapes {foreign[:5]}, which are not saved by name, nor reduced over ranks. Make them part of the model, or "
                "make the optimizer after the model is complete.",
            )

    def check_schedule(self, *, evaluates: bool) -> None:
        """Refuse a schedule that goes by a metric, if no evaluation computes one. May be called on one rank."""
        runner = self._runner
        interval, monitors = interval_of(runner), "monitor" in runner.config.get("scheduler", {})
        check_metric_of_schedule(runner.scheduler, interval=interval, evaluates=evaluates, monitors=monitors)
        if runner.is_main_process and runner.scheduler is not None and needs_metric(runner.scheduler):
            self._check_mode(runner.scheduler)

    def _check_mode(self, scheduler: object) -> None:
        """Name the mode of a schedule that follows a metric where it is another one than that of the score, or a guess."""
        runner = self._runner
        names = {"min": "lowest", "max": "highest"}
        mode = getattr(scheduler, "mode", None)
        board = runner.standing.board
        section = runner.config.get("scheduler", None) or {}
        monitor = section.get("monitor", None)
        if mode not in names:
            return
        if monitor and monitor != score_path(runner):
            if mode == "max" and section.get("mode", None) is None and scheduler is self.built_scheduler:
                logger.info(
                    "%s follows the highest %s; set scheduler.mode if lower is better.",
                    type(scheduler).__name__,
                    monitor,
                )
        elif board is not None and board.mode != mode:
            logger.warning(
                "Expected the %s to have the mode of the score %s, of which the %s is the best. Received: mode=%r. Make it with mode=%r "
                "(scheduler.mode), or set score_mode=%r.",
                *(type(scheduler).__name__, score_path(runner), names[board.mode], mode, board.mode, mode),
            )

    # Events

    def training_started(self) -> None:
        """Look at the modes and the schedule that a training begins with."""
        runner, scheduler = self._runner, self._runner.scheduler
        self._groups = len(getattr(runner.optimizer, "param_groups", ()))
        self._highest_rate = max(self._highest_rate, self._rate())
        frozen = [name for name, part in _in_evaluation(runner.unwrapped_model) if name and not _is_trained(part)]
        if frozen:
            self._warn(
                "frozen",
                f"Frozen parts of the model were in evaluation mode when training began: {listed(frozen)}. They are in training mode "
                "now, as the whole model is: dropout draws, batch statistics move. To keep them as they were, override its `train`.",
            )
        is_of_run = isinstance(scheduler, (WarmupScheduler, OneCycleSchedule)) or not isinstance(scheduler, LRScheduler)
        is_asked = "interval" in (runner.config.get("scheduler", None) or {})
        advances = not (runner.is_step_mode or is_asked or is_of_run) and interval_of(runner) == "step"
        if advances and runner.is_main_process:
            updates = self._data.updates_of_epoch
            logger.info(
                "%s advances after every update%s. Where it counts epochs, set scheduler.interval=epoch; scheduler.interval=step keeps it, "
                "and leaves this line out.",
                type(scheduler).__name__,
                f", {updates} times an epoch" if updates else "",
            )

    def pass_started(self, split: str) -> None:
        """Look at modes, parameters, the schedule's optimizer and the learning rate."""
        self.results_needed()

    def results_needed(self) -> None:
        """Look at modes, parameters, the schedule's optimizer and the learning rate, within a training."""
        runner, scheduler = self._runner, self._runner.scheduler
        if not self._session.running:
            return
        self._look_at_rate()
        added = len(runner.optimizer.param_groups) - self._groups
        if added > 0:
            self._warn(
                "groups",
                f"{added} parameter group{'s were' if added > 1 else ' was'} added to the optimizer since the training began. A resume "
                "needs an optimizer with all groups, else it is refused: make them in __init__, frozen with requires_grad_(False) until "
                "they are trained.",
            )
        left = [name or "the whole model" for name, part in _in_evaluation(runner.unwrapped_model) if _is_trained(part)]
        if left:
            self._warn(
                "mode",
                f"In evaluation mode while it trains: {listed(left)}. Dropout is off, batch statistics stay as they are. Call `.train()` "
                "where your code has called `.eval()`; where that is meant, override `train` of the module.",
            )
        schedules = list(scheduler) if isinstance(scheduler, JointScheduler) else [scheduler]
        groups = {id(group) for group in runner.optimizer.param_groups}
        moved = [getattr(getattr(each, "optimizer", None), "param_groups", None) for each in schedules]
        if any(each is not None and groups.isdisjoint(map(id, each)) for each in moved):
            self._warn(
                "schedule",
                f"self.scheduler, a {type(scheduler).__name__}, moves the learning rates of another optimizer than self.optimizer, "
                "whose rates stay as they are. Make the schedule over self.optimizer, after that is made.",
            )
        optimized = {id(parameter) for parameter in runner.preparation.optimized_parameters(runner.optimizer)}
        named = runner.named_parameters()
        self._warn_of_left_out([name for name, p in named if p.requires_grad and id(p) not in optimized])

    def _warn_of_left_out(self, left_out: Iterable[str]) -> None:
        names = [name for name in left_out if name not in self._left_out]
        self._left_out.update(names)
        if names:
            self._warn(
                f"left out: {names}",
                "Expected every parameter that requires a gradient in the optimizer. Received: a "
                f"{type(self._runner.optimizer).__name__} without {listed(names)}, which stay as they are. Make the optimizer after the "
                "model is complete, over all that is to be trained at any time, freeze the rest with requires_grad_(False), and write new "
                "values in place: parameter.copy_(values).",
            )

    def _look_at_rate(self) -> None:
        runner = self._runner
        rate = self._rate()
        self._highest_rate = max(self._highest_rate, rate)
        # A schedule with restarts comes near zero for a moment.
        self._times_low = self._times_low + 1 if rate < _COLLAPSED * self._highest_rate else 0
        step, steps = runner.state.train.global_step, runner.steps
        done = step / steps if steps else runner.progress
        if self._times_low > 1 and done < 0.5:
            self._warn(
                "rate",
                f"The learning rate has fallen to {rate:.1e} after {step} updates, from {self._highest_rate:.1e}, and {1 - done:.0%} of "
                "the run is left: hardly anything is trained any more. A schedule that counts epochs needs scheduler.interval=epoch; by "
                "default it advances after every update.",
            )

    def _rate(self) -> float:
        # In a loop by hand the optimizer need not be on the runner.
        return max((rate for rate in rates_of(self._runner.optimizer) if rate is not None), default=0.0)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned and self._runner.is_main_process:
            logger.warning("%s", message)
        self._warned.add(kind)


class FirstGradients(Observer):
    """Warns of parameters whose gradients and optimizer do not go together in the first update, then removes itself.

    These are trained parameters without a gradient (not with several optimizers, each of which has its own updates), parameters with
    a gradient that neither the model nor an optimizer has, and gradients that a loss scaler of the program's has left scaled.
    """

    def __init__(self, runner: TorchRunner, *, has_phases: bool) -> None:
        self._runner = runner
        self._has_phases = has_phases
        self._scalers: dict[str, tuple[torch.amp.GradScaler, dict[str, Any]]] = {}

    def training_started(self) -> None:
        """Note the state of loss scalers of the program's."""
        runner = self._runner
        own = {name: value for name, value in vars(runner).items() if name not in runner.library_names}
        # It may be that of another optimizer, which train_step steps.
        has_others = any(isinstance(value, torch.optim.Optimizer) for value in own.values())
        if is_overridden(runner, "train_step") and not (
            has_others or any(is_overridden(runner, name) for name in _UNSCALING)
        ):
            scalers = {name: value for name, value in own.items() if isinstance(value, torch.amp.GradScaler)}
            self._scalers = {name: (each, each.state_dict()) for name, each in scalers.items() if each.is_enabled()}

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """Look at the gradients. Called on all ranks."""
        runner = self._runner
        if not float(totals.weight):
            return
        runner.observers.remove(self)
        self._name_scalers()
        optimized = runner.preparation.optimized_parameters(runner.optimizer)
        self._name_unknown(optimized)
        if self._has_phases:
            return
        mine = runner.reduction.without_gradient({id(parameter) for parameter in optimized})
        missing = dict.fromkeys(name for names in runner.world.gather_objects(mine) for name in names)
        if not missing:
            return
        # Another rank may have its gradient.
        trained = {name for name, parameter in runner.named_parameters() if parameter.requires_grad}
        found = set().union(*runner.world.gather_objects((trained - set(mine)) & missing.keys()))
        names = [name for name in missing if name not in found]
        if names and runner.is_main_process:
            logger.warning(
                "Expected a gradient for every parameter that is trained. Received: none in the first update for %s. The loss does not "
                "depend on them: use them in `forward`, or freeze them with requires_grad_(False).",
                listed(names),
            )

    def _name_scalers(self) -> None:
        """Name a loss scaler that train_step has not updated: where gradients are unscaled, that is needed for the next time."""
        for name, (scaler, before) in self._scalers.items():
            if scaler.state_dict() == before and self._runner.is_main_process:
                logger.warning(
                    "self.%s is a %s, and nothing takes its scale out of the gradients again: an update would be as many times too large. "
                    "Set precision='fp16', with which the runner scales losses itself, and remove it.",
                    *(name, type(scaler).__name__),
                )

    def _name_unknown(self, optimized: Iterable[nn.Parameter]) -> None:
        """Name parameters outside of the model that the loss depends on. May be called on one rank."""
        runner = self._runner
        optimizers = [item for _, item in _values(runner) if isinstance(item, torch.optim.Optimizer)]
        of_others = (
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        )
        known = {id(parameter) for parameter in (*optimized, *of_others)}
        known.update(id(parameter) for _, parameter in runner.named_parameters())
        outside = {name: p for name, p in parameters_outside(runner).items() if id(p) not in known}
        names = [name for name, parameter in outside.items() if parameter.grad is not None]
        if names and runner.is_main_process:
            logger.warning(
                "Expected every parameter that the loss depends on to be part of self.model. Received: a gradient for %s, which no "
                "optimizer updates and no checkpoint has by name. Make the modules part of self.model (lists of layers as nn.ModuleList), "
                "or freeze them with requires_grad_(False).",
                listed(names),
            )


class GivenMetrics:
    """The metrics that the program has set, of which those of evaluations were made."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._given = metrics_by_name(runner.metrics)

    def have_changed(self) -> bool:
        """Whether the program has set others since. May be called on one rank."""
        if "metrics" not in vars(self._runner):
            # A property of the program's, which may make new objects each time.
            return False
        now = metrics_by_name(self._runner.metrics)
        return self._given.keys() != now.keys() or any(self._given[name] is not metric for name, metric in now.items())

    def check(self) -> None:
        """Refuse metrics that were set after construction: nothing would compute them. May be called on one rank."""
        if self.have_changed():
            raise ValueError(
                "Expected self.metrics as it was when the runner was constructed, which evaluations compute. Received: "
                f"{sorted(metrics_by_name(self._runner.metrics))} instead of {sorted(self._given)}, or other objects under "
                "these names. Set all metrics in __init__ or in build_dataloaders."
            )


class MetricsInTraining(Observer):
    """Warns once of objects in `self.metrics` that the program updates in training: evaluations reset them, and no checkpoint has them."""

    def __init__(self, session: TrainingSession, metrics: MetricSet, *, is_main: bool) -> None:
        self._session = session
        self._metrics = metrics
        self._is_main = is_main
        self._noted: dict[str, object] = {}
        self._named: set[str] = set()

    def training_started(self) -> None:
        self._note()

    def pass_started(self, split: str) -> None:
        self._note()

    def evaluation_started(self, split: str) -> None:
        self._check()

    def evaluation_ended(self, split: str) -> None:
        self._note()

    def save_started(self) -> None:
        self._check()

    def _note(self) -> None:
        self._noted = self._metrics.counts()

    def _check(self) -> None:
        if not self._session.running:
            return  # a loop by hand may evaluate by hand too
        now = self._metrics.counts()
        # One that the program has reset since has nothing to lose.
        changed = {name for name, count in now.items() if count and count != self._noted.get(name, count)} - self._named
        self._named |= changed
        if changed and self._is_main:
            names = listed([f"self.metrics[{name!r}]" if name else "self.metrics" for name in sorted(changed)])
            logger.warning(
                "%s had updates outside of an evaluation. Evaluations reset the objects in self.metrics, and no checkpoint has them. Set "
                "train_metrics for metrics of training, or keep another object in another attribute, such as self.trained, which is "
                "saved.",
                names,
            )


def parameters_outside(runner: TorchRunner) -> dict[str, nn.Parameter]:
    """Return parameters of the program that are no part of its model, by where they are.

    Looked at are attributes of the runner, and plain lists, tuples and dictionaries in modules of the model, which torch does not register.
    """
    found: dict[str, nn.Parameter] = {}
    for where, item in _values(runner):
        if isinstance(item, nn.Parameter):
            found[where] = item
        elif isinstance(item, nn.Module):
            found.update({f"{where}.{name}": parameter for name, parameter in item.named_parameters()})
    return found


def _values(runner: TorchRunner) -> Iterator[tuple[str, object]]:
    """Yield what `parameters_outside` looks at, with its place."""
    taken = ("model", "criterion", "ema")
    places = [(f"self.{name}", value) for name, value in vars(runner).items() if name not in taken and name[0] != "_"]
    for name, module in runner.unwrapped_model.named_modules():
        prefix = f"model.{name}" if name else "model"
        places += [(f"{prefix}.{key}", value) for key, value in vars(module).items() if key[0] != "_"]
    for place, value in places:
        if type(value) in (list, tuple):
            yield from ((f"{place}[{index}]", item) for index, item in enumerate(value[:_MOST_ITEMS]))
        elif type(value) is dict:
            yield from ((f"{place}[{key!r}]", item) for key, item in islice(value.items(), _MOST_ITEMS))
        else:
            yield place, value


class FiniteWeights:
    """Refuses to save weights that are not finite: the optimizer's step may make them from a finite gradient.

    Parameters that are trained are read once for each save. Frozen ones, which no update changes, are looked at in the first save, and
    named; buffers are not looked at, since they may hold -inf by design.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._seen: set[int] = set()
        """`id` of the frozen parameters that were looked at."""

    def check(self) -> None:
        """Raise where a weight is not finite on some rank. One small collective: called on all ranks."""
        runner, domain = self._runner, self._runner.placement.optimizer
        held = {name: (p, runner.preparation.held(p)) for name, p in runner.named_parameters()}
        bad = _not_finite({name: local for name, (p, local) in held.items() if p.requires_grad})
        frozen = {name: local for name, (p, local) in held.items() if not p.requires_grad and id(p) not in self._seen}
        self._seen.update(id(p) for p, _ in held.values() if not p.requires_grad)
        for name in _not_finite(frozen)[:1]:
            logger.warning(
                "The frozen parameter %s is not finite. It is saved as it is; values that are -inf by design belong in a buffer.",
                name,
            )
        flag = torch.tensor(float(bool(bad)), dtype=torch.float64)
        if domain.size > 1:
            flag = domain.all_reduce(flag, "max")
        if not flag.item():
            return
        found = domain.gather_objects(bad) if domain.size > 1 else [bad]
        names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
        ranks = [rank for rank, of_rank in enumerate(found) if of_rank]
        others = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        raise NonFiniteError(
            f"Expected finite weights to save after step {runner.state.train.global_step}. Received: {names[0]!r}{others} with NaN or "
            f"infinity on ranks {ranks}. Loss and gradient were finite: the step of {type(runner.optimizer).__name__} or your own code "
            "made them. Nothing was saved, and the last checkpoint stays. Raise eps of the optimizer, lower the learning rate, or set "
            "max_grad_norm; then resume."
        )


class ExtraStates:
    """Names modules whose `get_extra_state` differs between ranks: a checkpoint has one state of model and criterion, for all ranks."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._named: set[str] = set()

    def check(self) -> None:
        """Compare the states at a save. A small collective: called on all ranks."""
        domain = self._runner.placement.optimizer
        # Stages of a pipeline have other modules.
        if domain.size == 1 or getattr(self._runner, "pipeline", None) is not None:
            return
        mine = {}
        for root, owner in (("model", self._runner.unwrapped_model), ("criterion", self._runner.criterion)):
            for name, module in owner.named_modules(prefix=root) if isinstance(owner, nn.Module) else ():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    digest = hashlib.sha1(usedforsecurity=False)
                    _feed(digest, module.get_extra_state())
                    mine[canonical_name(name)] = digest.digest()
        # Also of a rank that has none: a module may be on some ranks only.
        found = domain.gather_objects(mine)
        digests: dict[str, set[bytes]] = defaultdict(set)
        for of_rank in found:
            for name, digest_of_rank in of_rank.items():
                digests[name].add(digest_of_rank)
        names = [name for name, different in digests.items() if len(different) > 1 and name not in self._named]
        self._named.update(names)
        if names and domain.rank == 0:
            logger.warning(
                "get_extra_state() of %s returns something else on other ranks. A checkpoint has that of the first rank, with which all "
                "ranks resume: let it depend on what all ranks know, make it a buffer, or keep it in an attribute of the runner, which is "
                "saved for each rank.",
                listed(names),
            )


def _is_plain_tensor(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def _feed(digest: Any, value: object) -> None:
    """Add plain values and tensors to a digest; others, such as tensors that are divided over ranks, count by their class."""
    if _is_plain_tensor(value):
        held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(
            f"{held.dtype} {tuple(held.shape)}".encode() + held.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, Mapping):
        digest.update(f"mapping of {len(value)}:".encode())
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence of {len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    else:
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        digest.update(f"{value!r};".encode() if plain else f"{type(value).__name__};".encode())


@torch.no_grad()
def _not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with NaN or infinity."""
    known = {name: tensor for name, tensor in weights.items() if tensor.numel() and not tensor.is_meta}
    wide = {name: tensor for name, tensor in known.items() if tensor.dtype.itemsize > 1}
    narrow = [name for name, tensor in known.items() if tensor.is_floating_point() and name not in wide]
    wide = {name: tensor for name, tensor in wide.items() if tensor.is_floating_point() or tensor.is_complex()}
    suspects = list(narrow)
    if wide:
        # One pass, which reads each weight once. A norm may also overflow.
        norms = _norms(list(wide.values()))
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for norm in norms:
            by_device[norm.device].append(norm.float())
        if not all(bool(torch.stack(each).isfinite().all()) for each in by_device.values()):
            suspects += [name for name, norm in zip(wide, norms) if not bool(norm.isfinite())]
    # Types of eight bits have no arithmetic operations.
    exact = ((name, known[name].float() if name in narrow else known[name]) for name in suspects)
    return [name for name, tensor in exact if not bool(tensor.isfinite().all())]


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor. Those of a library's class, such as quantized weights, may have no operation for all at once."""
    try:
        return torch._foreach_norm(tensors, 2.0)
    except NotImplementedError:
        return [_norm(tensor) for tensor in tensors]


def _norm(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    values: Tensor = tensor if is_plain or not hasattr(tensor, "dequantize") else tensor.dequantize()
    found: Tensor = torch.linalg.vector_norm(values)
    return found


def _in_evaluation(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in evaluation mode, but for those that decide their mode in their own `train`."""
    if type(model).train is not nn.Module.train:
        return
    if not model.training:
        yield canonical_name(name), model
        return
    for child, module in model.named_children():
        path = f"{name}.{child}" if name else child
        yield from _in_evaluation(module, path)


def _is_trained(module: nn.Module) -> bool:
    # A module without parameters, such as dropout, counts as trained.
    parameters = list(module.parameters())
    return not parameters or any(parameter.requires_grad for parameter in parameters)


# Weights that are loaded


def with_tied_names(model: nn.Module, weights: Mapping[str, object]) -> dict[str, object]:
    """Return weights with an entry for each name of a tied weight of which another name is there.

    Safetensors and `save_pretrained` of Hugging Face write one name of each. Names are those of `model.state_dict()` without prefixes of
    wrappers.
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    groups = defaultdict[object, list[str]](list)
    for name, tensor in named:
        groups[id(tensor)].append(canonical_name(name))
    completed = dict(weights)
    for names in groups.values():
        given = next((name for name in names if name in weights), None)
        if given is not None:
            completed.update({name: weights[given] for name in names if name not in weights})
    persistent = {canonical_name(name) for name in model.state_dict()}
    return {name: value for name, value in completed.items() if name in weights or name in persistent}


def untied(model: nn.Module, weights: Mapping[str, object]) -> list[str]:
    """Return a sentence for each weight that the model ties and the loaded weights do not, or the other way round."""
    tied, shared = defaultdict[int, list[str]](list), defaultdict[tuple[int, object], list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(canonical_name(name))
    loaded = {name: value for name, value in weights.items() if isinstance(value, Tensor) and type(value) is Tensor}
    for name, value in loaded.items():
        if value.numel():
            shared[value.data_ptr(), value.shape].append(name)
    found = []
    first = {name: names[0] for names in tied.values() for name in names}
    for names in tied.values():
        given = [name for name in names if name in loaded]
        if any(not loaded[given[0]].equal(loaded[name]) for name in given[1:]):
            found.append(
                f"{listed(given)} are one weight of the model, and have different values in what was loaded: those of {given[-1]!r} count."
            )
    for names in shared.values():
        if len({first[name] for name in names if name in first}) > 1:
            found.append(
                f"{listed(names)} are one weight in what was loaded, and several in the model, which training makes different. Tie them "
                "in __init__."
            )
    return found
