"""What the `step` of a schedule wants."""

from __future__ import annotations

import inspect

from torch.optim.lr_scheduler import ReduceLROnPlateau


def needs_metric(scheduler: object) -> bool:
    """Whether `step` of a schedule, or of a class of schedules, wants the value of a metric, as that of `ReduceLROnPlateau` does."""
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    if issubclass(kind, ReduceLROnPlateau):
        return True
    step = getattr(kind, "step", None)
    parameters = list(inspect.signature(step).parameters.values())[1:] if step is not None else []
    return any(
        p.name in ("metrics", "metric") and p.default is inspect.Parameter.empty for p in parameters
    )


def takes_position(scheduler: object) -> bool:
    """Whether a schedule wants the epoch or the update, as those of timm do: `step(epoch)` and `step_update(num_updates)`."""
    step = getattr(type(scheduler), "step", None)
    if step is None or not callable(getattr(scheduler, "step_update", None)):
        return False
    first = list(inspect.signature(step).parameters.values())[1:2]
    return bool(first) and first[0].name == "epoch" and first[0].default is inspect.Parameter.empty
