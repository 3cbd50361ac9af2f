"""Whether a training trains what it should: optimizer, schedule, learning rate and modes of modules, before it begins and at its passes."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from danling.optim import JointScheduler, needs_metric
from danling.optim.registry import OneCycleSchedule, check_metric_of_schedule, is_stuck
from danling.optim.state import rates_of
from danling.optim.warmup import WarmupScheduler
from danling.utils.hooks import is_overridden
from danling.utils.messages import listed
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name

from .schedule import interval_of, score_path

if TYPE_CHECKING:
    from danling.data.run_data import RunData
    from danling.runners.torch_runner import TorchRunner

    from .session import TrainingSession

logger = logging.getLogger("danling")

_COLLAPSED = 1e-6
"""Share of its highest value below which a learning rate trains nothing."""

_FOR_EACH = "which is called for each split to evaluate, in their order."
_UNCALLED = {
    "epochs": (
        (
            ("evaluate_epoch",),
            ("evaluate", "evaluate_steps"),
            f"Override `evaluate_epoch(self, split)`, {_FOR_EACH}",
        ),
        (
            ("train_epochs", "train_epoch"),
            ("train_steps",),
            "Override `train_epochs` or `train_epoch`.",
        ),
    ),
    "steps": (
        (
            ("evaluate_steps",),
            ("evaluate", "evaluate_epoch"),
            f"Override `evaluate_steps(self, split, steps=None)`, {_FOR_EACH}",
        ),
        (
            ("train_steps",),
            ("train_epochs", "train_epoch"),
            "Override `on_pass_start(self, split)` for what a pass begins with, `step` for what follows each update, or `train_steps`.",
        ),
    ),
}
"""By the unit of the budget: what a training calls, one of which is enough, what users override instead, and the fix."""


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
        # No training has begun: no group counts as added.
        self._groups = sys.maxsize
        self._highest_rate = 0.0
        self._times_low = 0

    def check_calls(self, unit: str, *, evaluates: bool) -> None:
        """Name once the overridden methods that a training by this unit does not call. May be called on one rank."""
        run = self._runner
        for called, others, fix in _UNCALLED[unit]:
            verb = called[0]
            # A class may serve both units: `train_epoch` for one, `train_steps` for the other.
            if any(_is_own(run, name) for name in called):
                continue
            if not evaluates and verb.startswith("evaluate"):
                continue
            own = [name for name in others if _is_own(run, name)]
            if own:
                names = " and ".join(f"`{name}`" for name in own)
                self._warn(
                    f"not called: {own}",
                    f"Expected overrides of methods that a training by {unit} calls. Received: {names} of {type(run).__name__}, which it "
                    f"does not call by itself, since it calls `{verb}`. {fix} If your program calls it, ignore this.",
                )

    def note_stopped(self) -> None:
        """Name once a loop by hand that goes on where it was asked to stop. May be called on one rank."""
        if self._session.stop_reason == "stop":
            self._warn(
                "stopped",
                "The run was asked to stop, by `stop()` or `max_time`, and `train_epoch` is called again: it trains the rest of that pass. "
                "What the loop did in between, such as an evaluation, was done half-way through it. End the loop where `train_epoch` "
                "returns {}.",
            )

    def check_optimizer_given(self) -> None:
        """Refuse to train without an optimizer. May be called on one rank."""
        if self._runner.optimizer is None:
            built = (
                "`build_optimizer` returned none. "
                if is_overridden(self._runner, "build_optimizer")
                else ""
            )
            own = [
                name
                for name, value in vars(self._runner).items()
                if isinstance(value, torch.optim.Optimizer)
            ]
            if len(own) > 1:
                entries = ", ".join(f"{name!r}: self.{name}" for name in own)
                raise ValueError(
                    f"Expected an optimizer. Received: optimizer=None, and optimizers in {listed([f'self.{name}' for name in own])}. Write "
                    f"self.optimizer = {{{entries}}} in __init__, and in train_step for each of them: with "
                    f"self.optimizing({own[0]!r}): self.backward(loss), which also makes the update."
                )
            own_one = (
                f"You have set `self.{own[0]}`: did you mean `self.optimizer`? " if own else ""
            )
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
        if needs_closure and not (
            is_overridden(run, "step") and is_overridden(run, "optimizer_step")
        ):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {kind}, whose step calls a closure again and "
                "again. Override both `step` and `optimizer_step` for it, or choose another."
            )
        # Several optimizers that are held together have a list of them.
        members = getattr(run.optimizer, "optimizers", [run.optimizer])
        if any(map(is_stuck, members)):
            raise ValueError(
                "Expected an optimizer that moves the weights. Received: SGD(fused=True) over bfloat16 or float16 weights on the CPU, "
                "of which torch's fused form moves only those that do not fill a vector register. Set fused=False."
            )
        optimized = {
            id(parameter): parameter
            for parameter in run.preparation.optimized_parameters(run.optimizer)
        }
        named = dict(run.named_parameters())
        left_out = [name for name, p in named.items() if p.requires_grad and id(p) not in optimized]
        known = {id(parameter) for parameter in named.values()}
        foreign = [
            tuple(parameter.shape) for key, parameter in optimized.items() if key not in known
        ]
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
        # One process without averages may train another model than that of construction.
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
        check_metric_of_schedule(
            runner.scheduler, interval=interval, evaluates=evaluates, monitors=monitors
        )
        if (
            runner.is_main_process
            and runner.scheduler is not None
            and needs_metric(runner.scheduler)
        ):
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
            # Nothing tells which value of another metric is the better one, but its name.
            is_guess = section.get("mode", None) is None and scheduler is self.built_scheduler
            if mode == "max" and is_guess:
                logger.info(
                    "%s follows the highest %s; set scheduler.mode if lower is better.",
                    type(scheduler).__name__,
                    monitor,
                )
        elif board is not None and board.mode != mode:
            logger.warning(
                "Expected the %s to have the mode of the score %s, of which the %s is the best. Received: mode=%r. Make it with mode=%r "
                "(scheduler.mode), or set score_mode=%r.",
                *(
                    type(scheduler).__name__,
                    score_path(runner),
                    names[board.mode],
                    mode,
                    board.mode,
                    mode,
                ),
            )

    # Events

    def training_started(self) -> None:
        """Look at the modes and the schedule that a training begins with."""
        runner, scheduler = self._runner, self._runner.scheduler
        self._groups = len(getattr(runner.optimizer, "param_groups", ()))
        self._highest_rate = max(self._highest_rate, self._rate())
        frozen = [
            name
            for name, part in _in_evaluation(runner.unwrapped_model)
            if name and not _is_trained(part)
        ]
        if frozen:
            self._warn(
                "frozen",
                f"Frozen parts of the model were in evaluation mode when training began: {listed(frozen)}. They are in training mode "
                "now, as the whole model is: dropout draws, batch statistics move. To keep them as they were, override its `train`.",
            )
        is_of_run = isinstance(scheduler, (WarmupScheduler, OneCycleSchedule)) or not isinstance(
            scheduler, LRScheduler
        )
        # Schedules of torch do not say whether they count updates or epochs, and most examples count epochs.
        is_asked = "interval" in (runner.config.get("scheduler", None) or {})
        advances = (
            not (runner.is_step_mode or is_asked or is_of_run) and interval_of(runner) == "step"
        )
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
        # A group that a program adds in training is not there when a resume makes the optimizer.
        added = len(runner.optimizer.param_groups) - self._groups
        if added > 0:
            self._warn(
                "groups",
                f"{added} parameter group{'s were' if added > 1 else ' was'} added to the optimizer since the training began. A resume "
                "needs an optimizer with all groups, else it is refused: make them in __init__, frozen with requires_grad_(False) until "
                "they are trained.",
            )
        left = [
            name or "the whole model"
            for name, part in _in_evaluation(runner.unwrapped_model)
            if _is_trained(part)
        ]
        if left:
            self._warn(
                "mode",
                f"In evaluation mode while it trains: {listed(left)}. Dropout is off, batch statistics stay as they are. Call `.train()` "
                "where your code has called `.eval()`; where that is meant, override `train` of the module.",
            )
        # An optimizer that the program has made anew leaves the schedule with the old one.
        schedules = list(scheduler) if isinstance(scheduler, JointScheduler) else [scheduler]
        groups = {id(group) for group in runner.optimizer.param_groups}
        moved = [
            getattr(getattr(each, "optimizer", None), "param_groups", None) for each in schedules
        ]
        if any(each is not None and groups.isdisjoint(map(id, each)) for each in moved):
            self._warn(
                "schedule",
                f"self.scheduler, a {type(scheduler).__name__}, moves the learning rates of another optimizer than self.optimizer, "
                "whose rates stay as they are. Make the schedule over self.optimizer, after that is made.",
            )
        optimized = {
            id(parameter) for parameter in runner.preparation.optimized_parameters(runner.optimizer)
        }
        named = runner.named_parameters()
        self._warn_of_left_out(
            [name for name, p in named if p.requires_grad and id(p) not in optimized]
        )

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
        # In the second half of a run a rate near zero is what many schedules are for.
        if self._times_low > 1 and done < 0.5:
            self._warn(
                "rate",
                f"The learning rate has fallen to {rate:.1e} after {step} updates, from {self._highest_rate:.1e}, and {1 - done:.0%} of "
                "the run is left: hardly anything is trained any more. A schedule that counts epochs needs scheduler.interval=epoch; by "
                "default it advances after every update.",
            )

    def _rate(self) -> float:
        # In a loop by hand the optimizer need not be on the runner.
        return max(
            (rate for rate in rates_of(self._runner.optimizer) if rate is not None), default=0.0
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned and self._runner.is_main_process:
            logger.warning("%s", message)
        self._warned.add(kind)


def _is_own(runner: object, name: str) -> bool:
    """Whether the method is the user's own, by the class or as an attribute of the runner."""
    return name in vars(runner) or is_overridden(runner, name)


def _in_evaluation(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in evaluation mode, but for those that decide their mode in their own `train`."""
    if type(model).train is not nn.Module.train:
        return
    if not model.training:
        yield canonical_name(name), model
        return
    for child, module in model.named_children():
        yield from _in_evaluation(module, f"{name}.{child}".removeprefix("."))


def _is_trained(module: nn.Module) -> bool:
    # A module without parameters, such as dropout, counts as trained: it cannot be frozen.
    parameters = list(module.parameters())
    return not parameters or any(parameter.requires_grad for parameter in parameters)
