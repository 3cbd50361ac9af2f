"""An optimizer and a schedule out of the configuration: parameter groups by regular expression, and what a schedule needs to advance."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .registry import OPTIMIZERS, SCHEDULERS, is_told_its_place, needs_metric

_OWN = ("pattern", "options", "lr_multiplier", "weight_decay_multiplier", "beta1", "beta2")


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float | None,
    weight_decay: float | None,
    groups: Sequence[Mapping[str, object]],
    betas: Sequence[float] | None = None,
    whole: Mapping[str, bool] | None = None,
) -> list[dict[str, Any]]:
    """Return one optimizer group for every entry, and one for what no entry matches.

    A parameter belongs to the first entry whose `pattern` is found in its name (`re.search`). Parameters that do not require a
    gradient are left out, but a pattern that matches one of them has matched: hand in all parameters.

    Args:
        named_parameters: Names and parameters in model order.
        lr: Base rate, which `lr_multiplier` multiplies.
        weight_decay: Base decay, which `weight_decay_multiplier` multiplies.
        groups: Entries with `pattern` and any of `options`, `lr_multiplier`, `weight_decay_multiplier`, `beta1`, `beta2`. A
            multiplier multiplies the entry's own option where `options` has it.
        betas: Base betas, of which `beta1` and `beta2` replace one.
        whole: Where `named_parameters` are a part of a model: names of all its parameters, and whether they require a gradient.
            Every part gets the groups of the whole then, though some may be empty.

    Raises:
        ValueError: If an entry has an unknown key, no pattern, a pattern that matches nothing, or a multiplier of an unset option.
    """
    entries = [_checked(entry) for entry in groups]
    options: list[dict[str, Any]] = [{}, *(_options(entry, lr, weight_decay, betas) for entry in entries)]
    members: list[list[nn.Parameter]] = [[] for _ in options]
    mine = list(named_parameters)
    required = dict(whole) if whole is not None else {name: parameter.requires_grad for name, parameter in mine}
    # 0 is the group of what no entry matches.
    place = {
        name: next((i for i, entry in enumerate(entries, 1) if re.search(entry["pattern"], name)), 0)
        for name in required
    }
    unmatched = [entry["pattern"] for i, entry in enumerate(entries, 1) if i not in place.values()]
    if unmatched:
        raise ValueError(
            f"Expected the pattern of an optim.param_groups entry to match a parameter that no earlier entry takes. Received: "
            f"pattern={unmatched[0]!r}; the parameters begin with {list(required)[:5]}."
        )
    for name, parameter in mine:
        if parameter.requires_grad:
            members[place[name]].append(parameter)
    kept = {place[name] for name, trained in required.items() if trained}
    return [{"params": params, **options[i]} for i, params in enumerate(members) if i in kept]


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in entry if name not in _OWN]
    if unknown or not isinstance(entry.get("pattern"), str):
        raise ValueError(
            f"Expected every optim.param_groups entry to have a `pattern` and keys out of {list(_OWN)}. Received: {dict(entry)}."
        )
    try:
        re.compile(entry["pattern"])
    except re.error as error:
        raise ValueError(f"Expected a regular expression. Received: pattern={entry['pattern']!r} ({error}).") from error
    return dict(entry)


def _options(
    entry: Mapping[str, Any], lr: float | None, weight_decay: float | None, betas: Sequence[float] | None
) -> dict[str, Any]:
    options = dict(entry.get("options") or {})
    for name, setting in (("lr", lr), ("weight_decay", weight_decay)):
        multiplier = entry.get(f"{name}_multiplier")
        if multiplier is None:
            continue
        base = options.get(name, setting)
        if base is None:
            raise ValueError(
                f"Expected optim.{name} to be set where {name}_multiplier is used. Received: optim.{name}=None."
            )
        options[name] = base * multiplier
    beta1, beta2 = entry.get("beta1"), entry.get("beta2")
    if beta1 is not None or beta2 is not None:
        first, second = options.get("betas", betas) or (0.9, 0.999)
        options["betas"] = (first if beta1 is None else beta1, second if beta2 is None else beta2)
    return options


_SCHEDULER_KEYS = ("interval", "monitor")
"""Keys of the section `scheduler` that are the runner's and not the schedule's."""


def build_optimizer(
    settings: Mapping[str, Any],
    named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    *,
    device: torch.device,
    whole: Mapping[str, bool] | None = None,
) -> Optimizer:
    """Return the optimizer of the section `optim` over the parameters that require a gradient."""
    options = dict(settings)
    groups = options.pop("param_groups", None)
    if groups:
        bases = {name: options.get(name) for name in ("lr", "weight_decay", "betas")}
        params: list[Any] = build_param_groups(named_parameters(), groups=groups, whole=whole, **bases)
    else:
        params = [parameter for _, parameter in named_parameters() if parameter.requires_grad]
    trains_here = any(not isinstance(entry, dict) or entry["params"] for entry in params)
    if whole is None or trains_here or not any(whole.values()):
        return OPTIMIZERS.build(params=params, **options)
    # All groups are empty on this rank.
    first, *others = params or [{"params": []}]
    stand_in = nn.Parameter(torch.zeros((), device=device))
    optimizer = OPTIMIZERS.build(params=[{**first, "params": [stand_in]}, *others], **options)
    optimizer.param_groups[0]["params"] = []
    return optimizer


def build_scheduler(settings: Mapping[str, Any], optimizer: object, *, steps: int | None, epochs: int | None) -> object:
    """Return the schedule of the section `scheduler`; one over the whole run is given its length."""
    if not settings:
        return None
    options = {key: value for key, value in settings.items() if key not in _SCHEDULER_KEYS}
    if "type" not in options:
        received = ", ".join(f"scheduler.{name}={value!r}" for name, value in options.items()) or "none"
        raise ValueError(
            f"Expected scheduler.type next to other keys of the section. Received: {received}. "
            "Set scheduler.type, such as to 'cosine'."
        )
    length = epochs if scheduler_interval(settings, name=options["type"]) == "epoch" else steps
    if length is not None and "total_steps" not in options and SCHEDULERS.accepts(options["type"], "total_steps"):
        options["total_steps"] = length
    return SCHEDULERS.build(optimizer, **options)


def scheduler_interval(settings: Mapping[str, object], scheduler: object = None, *, name: str = "") -> str:
    """Return when a schedule advances: `"step"`, `"epoch"` or `"validation"`."""
    asked = settings.get("interval", None)
    if is_told_its_place(scheduler):
        own = "epoch" if getattr(scheduler, "t_in_epochs", True) else "step"
        if asked and asked != own:
            raise ValueError(
                f"Expected scheduler.interval={own!r}, in which the {type(scheduler).__name__} counts. Received: "
                f"scheduler.interval={asked!r}. "
                "Unset it, or make the schedule with another t_in_epochs."
            )
        return own
    if asked:
        return str(asked)
    by_metric = needs_metric(scheduler) if scheduler is not None else "plateau" in name.lower()
    return "epoch" if by_metric else "step"


def check_metric_of_schedule(scheduler: object, *, interval: str, evaluates: bool, monitors: bool) -> None:
    """Refuse a schedule that goes by a metric which is never computed, or that it is not told, as timm's."""
    kind = type(scheduler).__name__
    if is_told_its_place(scheduler) and isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
        raise ValueError(
            f"Expected a schedule by a metric as torch makes it. Received: a {kind}, which leaves the learning rate as it is where it is "
            "told an epoch without a metric. Take torch.optim.lr_scheduler.ReduceLROnPlateau."
        )
    if scheduler is None or not needs_metric(scheduler):
        return
    if interval == "step":
        raise ValueError(
            f"Expected scheduler.interval to be 'epoch' or 'validation' for {kind}, which follows a metric of evaluation. "
            "Received: scheduler.interval='step'. Unset it."
        )
    if not evaluates and not monitors:
        raise ValueError(
            f"Expected an evaluation split for {kind}, which follows its metrics. Received: none. Put one into `self.datasets`, or "
            "set scheduler.monitor to a metric of training, such as 'train.loss'."
        )
