"""An observer that warns once of what does not train, and of what a program changes while it trains without meaning to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from danling.optim import JointScheduler
from danling.optim.registry import OneCycleSchedule
from danling.optim.warmup import WarmupScheduler
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name

from .component_checks import listed, ungraded, ungraded_names

if TYPE_CHECKING:
    from danling.distributed import StepTotals
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_COLLAPSED = 1e-6
"""Share of its highest value below which a learning rate trains nothing."""


class ComponentWatch(Observer):
    """Looks at the components of a run where passes, evaluations and saves are; never in an update."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._warned: set[str] = set()
        self._parameters: dict[str, nn.Parameter] = {}
        self._highest_rate = 0.0
        self._times_low = 0

    def training_started(self) -> None:
        """Look at the modes and the schedule that a training begins with."""
        runner, interval = self._runner, self._runner._parts.scheduler_interval()
        self._parameters = dict(runner.named_parameters())
        self._highest_rate = max(self._highest_rate, self._rate())
        frozen = [name for name, part in parts_in_evaluation(runner.unwrapped_model) if name and not _is_trained(part)]
        if frozen:
            self._warn(
                "frozen",
                f"Frozen parts of the model were in evaluation mode when training began: {listed(frozen)}. They are in training mode "
                "now, as the whole model is: dropout draws, batch statistics move. To keep them as they were, override its `train`.",
            )
        scheduler = runner.scheduler
        is_of_run = isinstance(scheduler, (WarmupScheduler, OneCycleSchedule)) or not isinstance(scheduler, LRScheduler)
        is_asked = "interval" in (runner.config.get("scheduler", None) or {})
        if not (runner.is_step_mode or is_asked or is_of_run) and interval == "step" and runner.is_main_process:
            updates = runner._data.splits.updates_of_epoch
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
        runner = self._runner
        if not runner._session.running:
            return
        self._look_at_rate()
        left = [
            name or "the whole model" for name, part in parts_in_evaluation(runner.unwrapped_model) if _is_trained(part)
        ]
        if left:
            self._warn(
                "mode",
                f"In evaluation mode while it trains: {listed(left)}. Dropout is off, batch statistics stay as they are. Call `.train()` "
                "where your code has called `.eval()`; where that is meant, override `train` of the module.",
            )
        if runner.scheduler is not None and not _moves(runner.scheduler, runner.optimizer):
            self._warn(
                "schedule",
                f"self.scheduler, a {type(runner.scheduler).__name__}, moves the learning rates of another optimizer than self.optimizer, "
                "whose rates stay as they are. Make the schedule over self.optimizer, after that is made.",
            )
        optimized = {id(parameter) for parameter in runner.preparation.optimized_parameters(runner.optimizer)}
        replaced = [
            name
            for name, parameter in runner.named_parameters()
            if parameter.requires_grad
            and id(parameter) not in optimized
            and self._parameters.get(name, parameter) is not parameter
        ]
        if replaced:
            self._warn(
                "parameters",
                f"Parameters of the model were replaced while it trains: {listed(replaced)}. The optimizer goes on with the former ones, "
                "and these are not trained. Write values in place, with torch.no_grad(): parameter.copy_(values).",
            )

    def _look_at_rate(self) -> None:
        runner, rate = self._runner, self._rate()
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
        groups = getattr(self._runner.optimizer, "param_groups", ())
        return max((float(group.get("lr", 0.0)) for group in groups), default=0.0)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned and self._runner.is_main_process:
            logger.warning("%s", message)
        self._warned.add(kind)


class FirstGradients(Observer):
    """Names what is trained and got no gradient in the first update, then removes itself. Not for several optimizers, stepped by phases."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """Look at the gradients. Called on all ranks."""
        runner = self._runner
        if not float(totals.weight):
            return
        runner.observers.remove(self)
        if runner._phases is not None:
            return
        optimized = runner.preparation.optimized_parameters(runner.optimizer)
        mine = runner.reduction.without_gradient({id(parameter) for parameter in optimized})
        trained = (name for name, parameter in runner.named_parameters() if parameter.requires_grad)
        names = ungraded_names(mine, trained, runner.world)
        if names and runner.is_main_process:
            logger.warning("%s", ungraded(names))


def parts_in_evaluation(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in evaluation mode, by canonical name; what decides its mode by a `train` of its own is left to it."""
    if type(model).train is not nn.Module.train:
        return
    if not model.training:
        yield canonical_name(name), model
        return
    for child, module in model.named_children():
        yield from parts_in_evaluation(module, f"{name}.{child}" if name else child)


def _is_trained(module: nn.Module) -> bool:
    """Whether something of a module is trained; a module without parameters, such as dropout, counts."""
    return any(parameter.requires_grad for parameter in module.parameters()) or not any(
        True for _ in module.parameters()
    )


def _moves(scheduler: Any, optimizer: Any) -> bool:
    """Whether a schedule is over an optimizer, or over what it is made of."""
    if isinstance(scheduler, JointScheduler):
        return all(_moves(each, optimizer) for each in scheduler)
    own = getattr(scheduler, "optimizer", None)
    return own is None or not _identities(own).isdisjoint(_identities(optimizer))


def _identities(optimizer: Any) -> set[int]:
    inner = (getattr(optimizer, "optimizer", None), *getattr(optimizer, "optimizers", ()))
    groups = {id(group) for group in getattr(optimizer, "param_groups", ())}
    return {id(optimizer)} | groups | {found for each in inner if each is not None for found in _identities(each)}


def untied(model: nn.Module, weights: Mapping[str, object]) -> list[str]:
    """Return a sentence for each weight that is tied in the model and not in what is loaded into it, or the other way round."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    loaded: dict[str, Tensor] = {}
    for name, value in weights.items():
        if type(value) is Tensor:
            loaded[name] = value
    found = []
    for tied in names.values():
        given = [name for name in tied if name in loaded]
        if any(not loaded[given[0]].equal(loaded[name]) for name in given[1:]):
            found.append(
                f"{listed(given)} are one weight of the model, and have different values in what was loaded: those of {given[-1]!r} count."
            )
    shared: dict[tuple[int, object], list[str]] = {}
    for name, value in loaded.items():
        shared.setdefault((value.data_ptr(), value.shape), []).append(name)
    first = {name: tied[0] for tied in names.values() for name in tied}
    for tied in shared.values():
        if loaded[tied[0]].numel() and len({first[name] for name in tied if name in first}) > 1:
            found.append(
                f"{listed(tied)} are one weight in what was loaded, and several in the model, which training makes "
                "different. Tie them in __init__."
            )
    return found
