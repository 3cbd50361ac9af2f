"""Options of an optimizer that a resumed run gives anew: which of them a restored state replaces, and how they are put in."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer

from .joint import JointScheduler
from .stored_kind import HOW, OF_SCHEDULES

logger = logging.getLogger("danling")

Options = list[dict[str, Any]]
"""What stands in each parameter group beside the parameters."""

_MOVED_BY_SCHEDULES = frozenset({"lr", "momentum", "betas"})


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of every group, such as `lr` and `weight_decay`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def given_names(optimizer: object) -> set[str]:
    """Return the names of the arguments that an optimizer, or several in one, is made of.

    Groups may have more entries: those of schedule-free optimizers have counters, which no program gives.
    """
    inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", None)]
    names = set().union(*(given_names(each) for each in inner if each is not None))
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            names |= inspect.signature(vars(kind)["__init__"]).parameters.keys()
    return names


def say_replaced(asked: Options, loaded: Options, *, given: Collection[str], scheduled: bool) -> None:
    """Warn of options that a restored state has given another value than the program did. May be called on one rank."""
    replaced: dict[str, str] = {}
    for before, after in zip(asked, loaded):
        moved = _MOVED_BY_SCHEDULES if "max_momentum" in after else {"lr"} if scheduled else set[str]()
        for name in sorted(before.keys() & after.keys() & set(given) - HOW - OF_SCHEDULES - moved):
            if _is_plain(before[name]) and _is_plain(after[name]) and before[name] != after[name]:
                replaced.setdefault(name, f"{name}={after[name]} (here {before[name]})")
    if replaced:
        logger.warning(
            "The optimizer goes on with the options of the checkpoint, which are not those of the program: %s. To have the program's, add "
            "'optimizer.param_groups' to checkpoint.exclude_from_loading.",
            ", ".join(replaced.values()),
        )


def adopt_options(optimizer: Optimizer, scheduler: object, options: Options, wanted: Callable[[str], bool]) -> None:
    """Put options into an optimizer that was restored. No communication: call it on every rank.

    A learning rate is put in as that which the schedule begins from: where the schedule stands, it is that share of the new one.
    """
    for group, own in zip(optimizer.param_groups, options):
        for name, value in own.items():
            if name not in ("lr", "initial_lr") and wanted(name):
                group[name] = value
    if wanted("lr"):
        _adopt_rates(optimizer, scheduler, [group.get("initial_lr", group["lr"]) for group in options])


def _adopt_rates(optimizer: Optimizer, scheduler: object, rates: list[Any]) -> None:
    for group, rate in zip(optimizer.param_groups, rates):
        before = group.get("initial_lr", group["lr"])
        if rate == before:
            continue  # the quotient below would round
        group["lr"] = rate * (group["lr"] / before) if before else rate
        if "initial_lr" in group:
            group["initial_lr"] = rate
    rate_of = {id(group): rate for group, rate in zip(optimizer.param_groups, rates)}
    schedules = list(scheduler) if isinstance(scheduler, JointScheduler) else [scheduler]
    for part in [part for each in schedules for part in (each, *getattr(each, "_schedulers", ()))]:
        if hasattr(part, "base_lrs"):
            groups = part.optimizer.param_groups
            part.base_lrs = [rate_of.get(id(group), base) for group, base in zip(groups, part.base_lrs)]
            part._last_lr = [group["lr"] for group in groups]


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, list)) or value is None
