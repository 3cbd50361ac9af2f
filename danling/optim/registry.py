"""Optimizers and schedules by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from danling.utils.messages import did_you_mean

from .warmup import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule, rewrite_rates

T = TypeVar("T", bound=Callable[..., Any])

# The library passes these itself.
_PASSED = ("params", "optimizer")
_OTHER_NAMES = {"learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "adam_epsilon": "eps"}


class Registry:
    """Builders by name; case, `-` and `_` do not matter."""

    def __init__(self, kind: str, known: Mapping[str, Callable[..., Any]]) -> None:
        self.kind = kind
        self._builders = {_key(name): builder for name, builder in known.items()}
        self._names = {_key(name): name for name in known}

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._builders

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        return sorted(self._names.values())

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a class or function known under `name`; a name that is known is taken over.

        Examples:
            >>> @OPTIMIZERS.register("lion")  # doctest: +SKIP
            ... class Lion(torch.optim.Optimizer): ...
        """

        def add(builder: T) -> T:
            self._builders[_key(name)] = builder
            self._names[_key(name)] = name
            return builder

        return add

    def lookup(self, name: str | None) -> Callable[..., Any]:
        """Return the builder called `name`."""
        if not isinstance(name, str) or name not in self:
            names = self.names()
            raise ValueError(
                f"Expected {self.kind} type to be one of {', '.join(names)}. Received: type={name!r}."
                f"{did_you_mean(str(name), names)}"
            )
        return self._builders[_key(name)]

    def options(self, name: str | None) -> list[str] | None:
        """Return the options that the builder called `name` takes; `None` when it takes any."""
        parameters = _parameters(self.lookup(name))
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return None
        return [option for option in parameters if option not in _PASSED]

    def accepts(self, name: str | None, option: str) -> bool:
        """Whether the builder called `name` takes `option` by that very name."""
        return option in _parameters(self.lookup(name))

    def check_options(self, name: str | None, options: Iterable[str]) -> None:
        """Check the names of options before anything is built."""
        given = list(options)
        valid = self.options(name)
        for option in given:
            if valid is not None and option not in valid:
                raise ValueError(
                    f"Expected options of {self.kind} {name!r} out of {', '.join(valid)}. Received: {option!r}."
                    f"{did_you_mean(_OTHER_NAMES.get(option, option), valid)}"
                )
        missing = [option for option in _required(self.lookup(name)) if option not in given]
        if missing:
            raise ValueError(
                f"Expected {self.kind} {name!r} to be given {', '.join(missing)}, which it has no default for. "
                f"Received: {', '.join(given) or 'no options'}."
            )


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _parameters(builder: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


def _required(builder: Callable[..., object]) -> list[str]:
    parameters = _parameters(builder)
    # A registered function may call its first argument what it likes.
    passed = [name for name in parameters if name in _PASSED] or list(parameters)[:1]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic and name not in passed
    ]


# Not SGD and Adagrad: their fused forms refuse sparse gradients, which cannot be told from the parameters.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})
_GROUP_KEYS = ("params", "param_names", "name", "initial_lr")


class OptimizerRegistry(Registry):
    """Every optimizer of `torch.optim` by its lower-case name, and what users register."""

    def build(self, params: object, type: str | None = None, **options: Any) -> Optimizer:
        """Build an optimizer.

        Adam and AdamW are fused where all parameters are plain floating tensors on one CPU or CUDA device, unless `fused` or
        `foreach` (or `capturable`, `differentiable`) is given; that differs from the loop over tensors by rounding only.
        Lists are taken where the optimizer wants a tuple, as for `betas`.
        """
        self.check_options(type, options)
        builder = self.lookup(type)
        entries = _listed(params)
        if not _tensors(entries):
            raise ValueError(
                f"Expected at least one parameter that requires a gradient for optimizer {type!r}. Received: none. Unfreeze a layer."
            )
        entries = [self._checked_group(type, entry) if isinstance(entry, dict) else entry for entry in entries]
        options = _with_tuples(builder, options)
        if _can_fuse(builder, entries, options):
            options["fused"] = True
        optimizer: Optimizer = builder(entries, **options)
        return optimizer

    def _checked_group(self, name: str | None, group: dict[str, Any]) -> dict[str, object]:
        # torch keeps an unknown key of a group and does nothing with it.
        valid = self.options(name)
        for key in group:
            if valid is not None and key not in valid and key not in _GROUP_KEYS:
                raise ValueError(
                    f"Expected options of a parameter group of optimizer {name!r} out of {', '.join(valid)}. Received: {key!r}."
                    f"{did_you_mean(key, valid)}"
                )
        return _with_tuples(self.lookup(name), group)


def _listed(params: Any) -> list[object]:
    """Return parameters or groups as lists: they are looked at before torch gets them, and may be generators."""
    if isinstance(params, (set, frozenset)):
        raise ValueError(
            "Expected parameters in an order that is the same in every process. Received: a set. Pass a list, such as "
            "list(model.parameters())."
        )
    entries = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            if "params" not in entry:
                raise ValueError(f"Expected every parameter group to have `params`. Received: keys {sorted(entry)}.")
            entries[number] = {**entry, "params": _listed(entry["params"])}
    return entries


def _tensors(entries: Sequence[object]) -> list[Any]:
    members = [member for entry in entries for member in (entry["params"] if isinstance(entry, dict) else [entry])]
    return [member[1] if isinstance(member, tuple) else member for member in members]


def _with_tuples(builder: Callable[..., object], options: Mapping[str, object]) -> dict[str, object]:
    parameters = inspect.signature(builder).parameters
    wanted = {name for name, parameter in parameters.items() if isinstance(parameter.default, tuple)}
    return {
        name: tuple(value) if name in wanted and isinstance(value, list) else value for name, value in options.items()
    }


def _can_fuse(builder: object, entries: Sequence[object], options: Mapping[str, object]) -> bool:
    if builder not in _FUSED or _IMPLEMENTATIONS & options.keys():
        return False
    if any(isinstance(entry, dict) and _IMPLEMENTATIONS & entry.keys() for entry in entries):
        return False
    tensors = _tensors(entries)
    # Not DTensor and other subclasses: they may live on several meshes, which one fused call cannot take.
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point() for tensor in tensors)
    devices = {tensor.device for tensor in tensors} if plain else set()
    return len(devices) == 1 and {device.type for device in devices} <= {"cpu", "cuda"}


OPTIMIZERS = OptimizerRegistry(
    "optimizer",
    {
        name.lower(): kind
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, Optimizer) and kind is not Optimizer
    },
)
"""Optimizers by name: `OPTIMIZERS.build(params=model.parameters(), type="adamw", lr=1e-3)`."""


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


_schedules: dict[str, Any] = {
    name.lower(): kind
    for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
    if issubclass(kind, LRScheduler) and name not in ("LRScheduler", "_LRScheduler")
}
_schedules.update(swalr=SWALR, onecyclelr=OneCycleSchedule)
_schedules.update(linear=LinearSchedule, cosine=CosineSchedule, constant=ConstantSchedule, wsd=WSDSchedule)

SCHEDULERS = SchedulerRegistry("scheduler", _schedules)
"""Schedulers by name: `SCHEDULERS.build(optimizer, type="cosine", total_steps=1000, warmup_steps=100)`."""
