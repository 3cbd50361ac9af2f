"""Optimizers and schedules by name and out of the configuration, parameter groups by regular expression, and when a schedule advances."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from danling.utils.messages import did_you_mean, name_of_code

from .arguments_of_step import needs_metric, takes_position
from .muon import ShardedMuon
from .warmup import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule, rewrite_rates

logger = logging.getLogger("danling")

T = TypeVar("T", bound=Callable[..., Any])

# The library passes these itself.
_PASSED = ("params", "optimizer")
_OTHER_NAMES = {"learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "adam_epsilon": "eps"}


class Registry:
    """Builders by name; case, `-` and `_` do not matter."""

    def __init__(self, kind: str, known: Mapping[str, Callable[..., object]]) -> None:
        self.kind = kind
        self._known = {_key(name): (name, builder) for name, builder in known.items()}

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._known

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        return sorted(name for name, _ in self._known.values())

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a class or function known under `name`; a name that is known is taken over.

        Examples:
            >>> @OPTIMIZERS.register("lion")  # doctest: +SKIP
            ... class Lion(torch.optim.Optimizer): ...
        """

        def add(builder: T) -> T:
            self._known[_key(name)] = name, builder
            return builder

        return add

    def lookup(self, name: str | None) -> Callable[..., Any]:
        """Return the builder called `name`."""
        if not isinstance(name, str) or name not in self:
            names = self.names()
            # A class of torch is known by its last name: `torch.optim.AdamW`.
            hint = (
                did_you_mean(str(name).rpartition(".")[2], names)
                if name
                else " Name one under the key 'type'."
            )
            raise ValueError(
                f"Expected {self.kind} type to be one of {', '.join(names)}. Received: type={name!r}.{hint}"
            )
        return self._known[_key(name)][1]

    def accepts(self, name: str | None, option: str) -> bool:
        """Whether the builder called `name` takes `option` by that very name."""
        return option in inspect.signature(self.lookup(name)).parameters

    def check_options(
        self, name: str | None, options: Iterable[str], *, in_group: bool = False
    ) -> None:
        """Refuse options that the builder called `name` does not take; but for one group, also a lack of those without a default."""
        parameters = inspect.signature(self.lookup(name)).parameters
        # A registered function may call its first argument what it likes.
        passed = [option for option in parameters if option in _PASSED] or list(parameters)[:1]
        own = {
            option: parameter for option, parameter in parameters.items() if option not in passed
        }
        named = [o for o, p in own.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in own.values())
        for option in options:
            if not (takes_any or option in named or (in_group and option in _GROUP_KEYS)):
                of = "a parameter group of " if in_group else ""
                raise ValueError(
                    f"Expected options of {of}{self.kind} {name!r} out of {', '.join(named)}. Received: {option!r}."
                    f"{did_you_mean(_OTHER_NAMES.get(option, option), named)}"
                )
        missing = [
            o for o in named if own[o].default is inspect.Parameter.empty and o not in options
        ]
        if missing and not in_group:
            raise ValueError(
                f"Expected {self.kind} {name!r} to be given {', '.join(missing)}, which it has no default for. "
                f"Received: {', '.join(options) or 'no options'}."
            )


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# Optimizers

# Not SGD and Adagrad: their fused forms refuse sparse gradients, which cannot be told from the parameters.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})
_GROUP_KEYS = ("params", "param_names", "name", "initial_lr")


class OptimizerRegistry(Registry):
    """Every optimizer of `torch.optim` by its lower-case name, and what users register."""

    def build(self, params: object, type: str | None = None, **options: Any) -> Optimizer:
        """Build an optimizer.

        Adam and AdamW are fused where all parameters are plain floating tensors on one CPU or CUDA device (float16 on the CPU is
        not), unless `fused` or `foreach` (or `capturable`, `differentiable`) is given; that differs from the loop over tensors by
        rounding only.
        Lists are taken where the optimizer wants a tuple, as for `betas`.
        """
        self.check_options(type, options)
        builder = self.lookup(type)
        entries = _listed(params)
        if not _tensors(entries):
            raise ValueError(
                f"Expected at least one parameter that requires a gradient for optimizer {type!r}. Received: none. Unfreeze a layer."
            )
        for number, entry in enumerate(entries):
            if isinstance(entry, dict):
                # torch keeps an unknown key of a group and does nothing with it.
                self.check_options(type, entry, in_group=True)
                entries[number] = _with_tuples(builder, entry)
        options = _with_tuples(builder, options)
        if _can_fuse(builder, entries, options):
            options["fused"] = True
        optimizer: Optimizer = builder(entries, **options)
        return optimizer


def _listed(params: Any) -> list[Any]:
    """Return parameters or groups as lists: they are looked at before torch gets them, and may be generators."""
    if isinstance(params, (set, frozenset)):
        raise ValueError(
            "Expected parameters in an order that is the same in every process. Received: a set. Pass a list, such as "
            "list(model.parameters())."
        )
    entries = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
    for each in entries:
        if isinstance(each, Mapping) and "params" not in each:
            raise ValueError(
                f"Expected every parameter group to have `params`. Received: keys {sorted(each)}."
            )
    return [
        {**each, "params": _listed(each["params"])} if isinstance(each, Mapping) else each
        for each in entries
    ]


def _tensors(entries: Sequence[object]) -> list[Any]:
    members = [
        member
        for entry in entries
        for member in (entry["params"] if isinstance(entry, dict) else [entry])
    ]
    # torch takes pairs of a name and a parameter too.
    return [member[1] if isinstance(member, tuple) else member for member in members]


def _with_tuples(
    builder: Callable[..., object], options: Mapping[str, object]
) -> dict[str, object]:
    """Return options with tuples where the builder has one by default: its state is the same from a file and from a program."""
    parameters = inspect.signature(builder).parameters
    wanted = {
        name for name, parameter in parameters.items() if isinstance(parameter.default, tuple)
    }
    return {
        name: tuple(value) if name in wanted and isinstance(value, list) else value
        for name, value in options.items()
    }


def is_stuck(optimizer: object) -> bool:
    """Whether an optimizer leaves most of its weights where they are: torch's fused SGD may, of half precision on the CPU."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    tensors = [tensor for group in groups for tensor in group["params"]]
    on_host = {each.dtype for each in tensors if each.device.type == "cpu"}
    return any(map(_fused_sgd_is_stuck, on_host & {torch.bfloat16, torch.float16}))


@lru_cache
def _fused_sgd_is_stuck(dtype: torch.dtype) -> bool:
    """Whether this torch computes what fills a vector register and does not write it back. Of 2.11 to 2.13, it does not."""
    weights = torch.zeros(256, dtype=dtype, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    torch.optim.SGD([weights], lr=1.0, fused=True).step()
    return bool((weights == 0).any())


def _can_fuse(builder: object, entries: Sequence[object], options: Mapping[str, object]) -> bool:
    if builder not in _FUSED or _IMPLEMENTATIONS & options.keys():
        return False
    if any(isinstance(entry, dict) and _IMPLEMENTATIONS & entry.keys() for entry in entries):
        return False
    tensors = _tensors(entries)
    # Not DTensor and other subclasses: they may live on several meshes, which one fused call cannot take.
    plain = all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
        for tensor in tensors
    )
    devices = {tensor.device for tensor in tensors} if plain else set()
    # On the CPU, torch's fused form adds eps in float16, where 1e-8 is 0, and makes infinite weights.
    if any(tensor.dtype == torch.float16 and tensor.device.type == "cpu" for tensor in tensors):
        return False
    return len(devices) == 1 and {device.type for device in devices} <= {"cpu", "cuda"}


OPTIMIZERS = OptimizerRegistry(
    "optimizer",
    {
        name.lower(): kind
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, Optimizer) and kind is not Optimizer
    }
    | {"muon": ShardedMuon},
)
"""Optimizers by name: `OPTIMIZERS.build(params=model.parameters(), type="adamw", lr=1e-3)`."""


_OWN = ("pattern", "options", "lr_multiplier", "weight_decay_multiplier", "beta1", "beta2")


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float | None,
    weight_decay: float | None,
    groups: Sequence[Mapping[str, Any]],
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
    options: list[dict[str, Any]] = [
        {},
        *(_group_options(entry, lr, weight_decay, betas) for entry in groups),
    ]
    members: list[list[nn.Parameter]] = [[] for _ in options]
    mine = list(named_parameters)
    required = (
        dict(whole)
        if whole is not None
        else {name: parameter.requires_grad for name, parameter in mine}
    )
    # 0 is the group of what no entry matches.
    place = {
        name: next((i for i, entry in enumerate(groups, 1) if re.search(entry["pattern"], name)), 0)
        for name in required
    }
    unmatched = [entry["pattern"] for i, entry in enumerate(groups, 1) if i not in place.values()]
    if unmatched:
        raise ValueError(
            f"Expected the pattern of an optim.param_groups entry to match a parameter that no earlier entry takes. Received: "
            f"pattern={unmatched[0]!r}; the parameters begin with {list(required)[:5]}."
        )
    for name, parameter in mine:
        if parameter.requires_grad:
            members[place[name]].append(parameter)
    # A group without a parameter on this rank stays where another stage has one for it: all have the same groups.
    kept = {place[name] for name, trained in required.items() if trained}
    return [{"params": params, **options[i]} for i, params in enumerate(members) if i in kept]


def _group_options(
    entry: Mapping[str, Any],
    lr: float | None,
    weight_decay: float | None,
    betas: Sequence[float] | None,
) -> dict[str, Any]:
    """Return the options of the group that an entry makes."""
    unknown = [str(name) for name in entry if name not in _OWN]
    if not isinstance(entry.get("pattern"), str) or unknown:
        hint = did_you_mean(unknown[0], _OWN) if unknown else ""
        raise ValueError(
            f"Expected every optim.param_groups entry to have a `pattern` and keys out of {list(_OWN)}. Received: {dict(entry)}.{hint}"
        )
    try:
        # Only to name the pattern in the error.
        re.compile(entry["pattern"])
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression. Received: pattern={entry['pattern']!r} ({error})."
        ) from error
    options = dict(entry.get("options") or {})
    for name, setting in (("lr", lr), ("weight_decay", weight_decay)):
        multiplier = entry.get(f"{name}_multiplier")
        if multiplier is not None:
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


def build_optimizer(
    settings: Mapping[str, Any],
    named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    *,
    model: nn.Module,
    device: torch.device,
    whole: Mapping[str, bool] | None = None,
) -> Optimizer:
    """Return the optimizer of the section `optim` over the parameters that require a gradient."""
    of_type = settings.get("type")
    if (
        not isinstance(of_type, str)
        or of_type not in OPTIMIZERS
        or OPTIMIZERS.lookup(of_type) is not ShardedMuon
    ):
        return _build(settings, list(named_parameters()), device=device, whole=whole)
    from .matrices import build_muon

    if whole is not None:
        raise ValueError(
            "Expected a model that every rank has all layers of with optim.type='muon'. Received: parallel.axes.pipeline above 1. Train on "
            "the other axes, or set optim.type='adamw'."
        )
    return build_muon(
        settings, named_parameters, model, lambda part, named: _build(part, named, device=device)
    )


def without_fused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `optim` that builds no fused optimizer, whose bits depend on where tensors are cut."""
    options = dict(settings)
    of_type = options.get("type")
    if OPTIMIZERS.accepts(of_type, "fused"):
        options["fused"] = False
    if OPTIMIZERS.lookup(of_type) is ShardedMuon:
        options["adamw"] = {**(options.get("adamw") or {}), "fused": False}
    return options


def _build(
    settings: Mapping[str, Any],
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    device: torch.device,
    whole: Mapping[str, bool] | None = None,
) -> Optimizer:
    """Return one optimizer over the parameters that require a gradient."""
    options = dict(settings)
    groups = options.pop("param_groups", None)
    if groups:
        bases = {name: options.get(name) for name in ("lr", "weight_decay", "betas")}
        params: list[Any] = build_param_groups(named, groups=groups, whole=whole, **bases)
    else:
        params = [parameter for _, parameter in named if parameter.requires_grad]
    trains_here = any(not isinstance(entry, dict) or entry["params"] for entry in params)
    if whole is None or trains_here or not any(whole.values()):
        return OPTIMIZERS.build(params=params, **options)
    # All groups are empty on this rank, and torch refuses an optimizer without parameters.
    first, *others = params or [{"params": []}]
    stand_in = nn.Parameter(torch.zeros((), device=device))
    optimizer = OPTIMIZERS.build(params=[{**first, "params": [stand_in]}, *others], **options)
    optimizer.param_groups[0]["params"] = []
    return optimizer


# Schedules


class SchedulerRegistry(Registry):
    """Every scheduler of `torch.optim.lr_scheduler` by its lower-case name, the warm-up schedules, and what users register."""

    def build(self, optimizer: object, type: str | None = None, **options: Any) -> Any:
        """Build a scheduler."""
        self.check_options(type, options)
        builder = self.lookup(type)
        for option, parameter in inspect.signature(builder).parameters.items():
            value = options.get(option)
            # Of a list of functions too, one for each group of parameters.
            names = [
                each
                for each in (value if isinstance(value, (list, tuple)) else [value])
                if isinstance(each, str)
            ]
            if names and "Callable" in str(parameter.annotation):
                raise ValueError(name_of_code(f"scheduler.{option}", names[0]))
        if "schedulers" in options:
            options["schedulers"] = [
                self.build(optimizer, **part) if isinstance(part, Mapping) else part
                for part in options["schedulers"]
            ]
        # ChainedScheduler takes the optimizer second.
        if "optimizer" in inspect.signature(builder).parameters:
            return builder(optimizer=optimizer, **options)
        return builder(optimizer, **options)


class OneCycleSchedule(OneCycleLR):
    """`OneCycleLR` that goes on when a resumed run has become longer; torch's raises at the end of the former run."""

    kept_options: ClassVar[tuple[str, ...]] = ("total_steps", "_schedule_phases")

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take up a saved position on this object's cycle. Restore the optimizer first."""
        own = {name: getattr(self, name) for name in self.kept_options}
        super().load_state_dict({**state_dict, **own})
        if state_dict["total_steps"] != self.total_steps:
            with warnings.catch_warnings():
                # It asks for get_last_lr, which holds the rates of the former cycle.
                warnings.simplefilter("ignore", UserWarning)
                rewrite_rates(self)


def refuse_new_groups(scheduler: object, error: Exception) -> None:
    """Raise what to do, where a schedule failed since its optimizer has more groups than it was made for."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    known = getattr(scheduler, "base_lrs", None) or getattr(scheduler, "min_lrs", None)
    if known is not None and len(groups) > len(known):
        raise ValueError(
            f"Expected self.scheduler to move the rates of all {len(groups)} groups of the optimizer. Received: a "
            f"{type(scheduler).__name__} made for {len(known)}, before add_param_group was called. Put all groups into the optimizer in "
            "__init__, frozen with requires_grad_(False) until they are trained, or use scheduler.type linear, cosine, constant or wsd, "
            "which take new groups."
        ) from error


_schedules: dict[str, Any] = {
    name.lower(): kind
    for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
    if issubclass(kind, LRScheduler) and name not in ("LRScheduler", "_LRScheduler")
}
_schedules.update(swalr=SWALR, onecyclelr=OneCycleSchedule)
_schedules.update(
    linear=LinearSchedule, cosine=CosineSchedule, constant=ConstantSchedule, wsd=WSDSchedule
)

SCHEDULERS = SchedulerRegistry("scheduler", _schedules)
"""Schedulers by name: `SCHEDULERS.build(optimizer, type="cosine", total_steps=1000, warmup_steps=100)`."""

_SCHEDULER_KEYS = ("interval", "monitor")
"""Keys of the section `scheduler` that are the runner's and not the schedule's."""


def build_scheduler(
    settings: Mapping[str, Any],
    optimizer: object,
    *,
    steps: int | None,
    epochs: int | None,
    mode: str | None = None,
) -> object:
    """Return the schedule of the section `scheduler`.

    Args:
        settings: The section.
        optimizer: The optimizer.
        steps: Length of the run in updates, which a schedule over the whole run is given.
        epochs: Its length in epochs.
        mode: `"min"` or `"max"`, whichever is better for the metric that a schedule follows, if the section does not say.
    """
    if not settings:
        return None
    options = {key: value for key, value in settings.items() if key not in _SCHEDULER_KEYS}
    if "type" not in options:
        received = (
            ", ".join(f"scheduler.{name}={value!r}" for name, value in options.items()) or "none"
        )
        raise ValueError(
            f"Expected scheduler.type next to other keys of the section. Received: {received}. "
            "Set scheduler.type, such as to 'cosine'."
        )
    by_epoch = scheduler_interval(settings, name=options["type"]) == "epoch"
    length = epochs if by_epoch else steps
    if "total_steps" not in options and SCHEDULERS.accepts(options["type"], "total_steps"):
        if length is not None:
            options["total_steps"] = length
        elif by_epoch and steps is not None:
            raise ValueError(
                f"Expected a budget of epochs for scheduler.interval='epoch'. Received: steps={steps}, which is no number of epochs. Set "
                "scheduler.interval='step', or `epochs` instead of `steps`, or scheduler.total_steps as a number of epochs."
            )
    by_metric = needs_metric(SCHEDULERS.lookup(options["type"])) and SCHEDULERS.accepts(
        options["type"], "mode"
    )
    if by_metric and options.get("mode") is None:
        options["mode"] = mode or "min"
    return SCHEDULERS.build(optimizer, **options)


def scheduler_interval(
    settings: Mapping[str, object], scheduler: object = None, *, name: str = ""
) -> str:
    """Return when a schedule advances: `"step"`, `"epoch"` or `"validation"`."""
    asked = settings.get("interval", None)
    if takes_position(scheduler):
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


def check_metric_of_schedule(
    scheduler: object, *, interval: str, evaluates: bool, monitors: bool
) -> None:
    """Refuse a schedule that goes by a metric which is never computed, or that it is not told, as timm's."""
    kind = type(scheduler).__name__
    if takes_position(scheduler) and isinstance(
        getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau
    ):
        raise ValueError(
            f"Expected a schedule by a metric as torch makes it. Received: a {kind}, whose step without a "
            "metric does not change the learning rate. Take torch.optim.lr_scheduler.ReduceLROnPlateau."
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
