"""An optimizer and a schedule out of the configuration, and what a schedule needs to advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .optimizers import OPTIMIZERS
from .param_groups import build_param_groups
from .schedulers import SCHEDULERS, is_told_its_place, needs_metric

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
    return _without_parameters(params or [{"params": []}], options, device)


def _without_parameters(groups: list[Any], options: dict[str, Any], device: torch.device) -> Optimizer:
    """Return an optimizer with these groups, all of which are empty on this rank."""
    stand_in = nn.Parameter(torch.zeros((), device=device))
    optimizer = OPTIMIZERS.build(params=[{**groups[0], "params": [stand_in]}, *groups[1:]], **options)
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
            f"Expected scheduler.type beside other keys of the section. Received: {received}. Set scheduler.type, such as to 'cosine'."
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
