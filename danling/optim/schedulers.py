"""Learning-rate schedules by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from .registry import Registry
from .warmup import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule, rewrite_rates

_NO_SCHEDULES = ("LRScheduler", "_LRScheduler")


class SchedulerRegistry(Registry):
    """Every scheduler of `torch.optim.lr_scheduler` by its lower-case name, the warm-up schedules, and what users register."""

    def build(self, optimizer: object, type: str | None = None, **options: Any) -> Any:
        """Build a scheduler."""
        self.check_options(type, options)
        builder = self.lookup(type)
        if "schedulers" in options:
            options["schedulers"] = [self._part(optimizer, part) for part in options["schedulers"]]
        # ChainedScheduler takes the optimizer second.
        if "optimizer" in inspect.signature(builder).parameters:
            return builder(optimizer=optimizer, **options)
        return builder(optimizer, **options)

    def _part(self, optimizer: object, part: object) -> Any:
        return self.build(optimizer, **part) if isinstance(part, Mapping) else part


class OneCycleSchedule(OneCycleLR):
    """`OneCycleLR` that goes on when a resumed run has become longer; torch's raises at the end of the former run."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take up a saved position on this object's cycle. Restore the optimizer first."""
        own = {name: getattr(self, name) for name in ("total_steps", "_schedule_phases")}
        super().load_state_dict({**state_dict, **own})
        if state_dict["total_steps"] != self.total_steps:
            with warnings.catch_warnings():
                # It asks for get_last_lr, which holds the rates of the former cycle.
                warnings.simplefilter("ignore", UserWarning)
                rewrite_rates(self)


def needs_metric(scheduler: object) -> bool:
    """Whether `scheduler.step` wants the value of a metric, as `ReduceLROnPlateau` does."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    step = getattr(type(scheduler), "step", None)
    parameters = list(inspect.signature(step).parameters.values())[1:] if step is not None else []
    return any(p.name in ("metrics", "metric") and p.default is inspect.Parameter.empty for p in parameters)


def is_told_its_place(scheduler: object) -> bool:
    """Whether a schedule is told the epoch or the update that it is at, as those of timm: `step(epoch)` and `step_update(num_updates)`."""
    kind: Any = type(scheduler)
    return bool(_is_told(kind))


@lru_cache(maxsize=32)
def _is_told(kind: Any) -> bool:
    step = getattr(kind, "step", None)
    if step is None or not callable(getattr(kind, "step_update", None)):
        return False
    first = list(inspect.signature(step).parameters.values())[1:2]
    return bool(first) and first[0].name == "epoch" and first[0].default is inspect.Parameter.empty


def advance_by_epoch(scheduler: Any, epochs: int) -> None:
    """Advance a schedule after an epoch."""
    if is_told_its_place(scheduler):
        scheduler.step(epochs)
    else:
        scheduler.step()


def _schedules() -> dict[str, Any]:
    classes = inspect.getmembers(lr_scheduler, inspect.isclass)
    known: dict[str, Any] = {
        name.lower(): cls for name, cls in classes if issubclass(cls, LRScheduler) and name not in _NO_SCHEDULES
    }
    known.update(swalr=SWALR, onecyclelr=OneCycleSchedule)
    known.update(linear=LinearSchedule, cosine=CosineSchedule, constant=ConstantSchedule, wsd=WSDSchedule)
    return known


SCHEDULERS = SchedulerRegistry("scheduler", _schedules())
"""Schedulers by name: `SCHEDULERS.build(optimizer, type="cosine", total_steps=1000, warmup_steps=100)`."""
