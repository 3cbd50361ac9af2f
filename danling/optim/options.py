"""Options of an optimizer that a resumed run gives anew, in the place of those it was saved with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Options = list[dict[str, Any]]
"""What stands in each parameter group beside the parameters."""


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of every group, such as `lr` and `weight_decay`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def adopt_options(optimizer: Optimizer, scheduler: object, options: Options, wanted: Callable[[str], bool]) -> None:
    """Put options into an optimizer that was restored. No communication: call it on every rank.

    A learning rate is put in as that which the schedule begins from: where the schedule stands, it is that share of the new one.

    Args:
        optimizer: The restored optimizer.
        scheduler: Its restored scheduler, or `None`.
        options: What `options_of` returned before it was restored.
        wanted: Whether an option, by name, is to be put in; others stay as they were restored.
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
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if hasattr(part, "base_lrs"):
            part.base_lrs = list(rates)
            part._last_lr = [group["lr"] for group in optimizer.param_groups]
