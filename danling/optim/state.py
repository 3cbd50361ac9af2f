"""What a save runs through: the state of an optimizer by parameter name, its options, and which of two sets of weights is in the model."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.utils.tensors import canonical_name, is_sharded

from .joint import JointOptimizer, JointScheduler

logger = logging.getLogger("danling")

_CLASS, _PARTS, _CONTEXT, _SHAPE, _STRIDE = "tensor_class", "parts", "context", "shape", "stride"


def to_parts(value: object) -> object:
    """Return a tensor that is made of others as a mapping of these and what puts them together; anything else as it is.

    It is such as `torch.compile` takes apart: with `__tensor_flatten__`. A DTensor is left, since checkpoints know it.
    """
    if not isinstance(value, Tensor) or is_sharded(value) or not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    kind = type(value)
    return {
        _CLASS: f"{kind.__module__}:{kind.__qualname__}",
        _PARTS: {name: to_parts(getattr(value, name)) for name in names},
        _CONTEXT: context,
        _SHAPE: list(value.shape),
        _STRIDE: list(value.stride()),
    }


def from_parts(value: object) -> object:
    """Return a copy of the value that `to_parts` took apart; of a plain tensor too.

    Only loaded modules are searched for the class: the program that made the optimizer has it, and no file decides on imports.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if not isinstance(value, Mapping) or _CLASS not in value:
        return value
    parts = {name: from_parts(part) for name, part in value[_PARTS].items()}
    kind = _class(str(value[_CLASS]))
    return kind.__tensor_unflatten__(parts, value[_CONTEXT], torch.Size(value[_SHAPE]), tuple(value[_STRIDE]))


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    # A dotted path would lead through other objects.
    found = getattr(found, path, None) if path.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise ValueError(
            f"Expected the optimizer that the checkpoint was saved with, whose state has tensors of the class {name}. Received: a program "
            "that has not loaded it. Make the same optimizer, or add 'optimizer' to checkpoint.exclude_from_loading."
        )
    return found


HOW = frozenset({"foreach", "fused", "maximize", "capturable", "differentiable"})
"""Options that versions of torch have added to optimizers, and which torch itself completes in an older state."""

_DECOUPLED = "decoupled_weight_decay"
"""The option in which Adam and AdamW differ; older versions of torch have not stored it."""

OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})

_OPTIONS_OF_TORCH = frozenset(
    name
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer)
    for name in inspect.signature(kind).parameters
)


def check_kind(
    optimizer: Optimizer, groups: Sequence[Mapping[str, object]], stored_groups: Iterable[Mapping[str, object]]
) -> None:
    """Refuse the state of another kind of optimizer, which torch would take in and fail over in the next update, or never.

    The options of its groups are all that torch stores of an optimizer's kind.
    """
    for group, stored in zip(groups, stored_groups):
        others = (set(group) ^ set(stored)) - HOW - OF_SCHEDULES - {_DECOUPLED}
        known = _DECOUPLED in stored and _DECOUPLED in group
        if others & _OPTIONS_OF_TORCH or (known and bool(stored[_DECOUPLED]) != bool(group[_DECOUPLED])):
            shown = (name for name in stored if name not in {"params", *HOW, *OF_SCHEDULES})
            raise ValueError(
                f"Expected the state of {type(optimizer).__name__}, the optimizer of this run. Received: that of another one, with "
                f"{', '.join(f'{name}={stored[name]}' for name in shown)}. Restore the optimizer, or add 'optimizer' to "
                "checkpoint.exclude_from_loading to begin afresh with the new one."
            )


def parameter_names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Return the name of every parameter of every group.

    A parameter without a name is called `group.{i}.{j}` by its place in the optimizer.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), canonical_name(name))
    return [
        [names.get(id(parameter), f"group.{i}.{j}") for j, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def named_state_dict(optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, object]:
    """Return `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`; tensors are not copied.

    A tensor that is made of others, such as a moment in 8 bits, is given by these."""
    names = parameter_names(optimizer, named_parameters)
    plain = optimizer.state_dict()
    flat = {
        index: name
        for group, labels in zip(plain["param_groups"], names)
        for index, name in zip(group["params"], labels)
    }
    return {
        "state": {
            flat[index]: {key: to_parts(value) for key, value in state.items()}
            for index, state in plain["state"].items()
        },
        "param_groups": [{**group, "params": labels} for group, labels in zip(plain["param_groups"], names)],
    }


def load_named_state_dict(
    optimizer: Optimizer, state: Mapping[str, Any], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Restore what `named_state_dict` returned; parameters are matched by name, groups by the names they hold."""
    names = parameter_names(optimizer, named_parameters)
    stored = [list(group["params"]) for group in state["param_groups"]]
    _check_groups(names, stored)
    plain = optimizer.state_dict()
    index_of = {
        name: i for group, labels in zip(plain["param_groups"], names) for i, name in zip(group["params"], labels)
    }
    groups = []
    for i, (group, labels) in enumerate(zip(plain["param_groups"], names)):
        # The same place first: several groups may be empty where this process holds a part of the model.
        candidates = [state["param_groups"][i], *state["param_groups"]]
        match = next(entry for entry in candidates if set(entry["params"]) == set(labels))
        groups.append({**match, "params": group["params"]})
    check_kind(optimizer, plain["param_groups"], groups)
    # Copies: an optimizer keeps tensors of the right dtype and device as they are, and the caller's would change in training.
    values = {
        index_of[name]: {key: from_parts(value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _check_groups(names: list[list[str]], stored: list[list[str]]) -> None:
    ours = {name for group in names for name in group}
    theirs = {name for group in stored for name in group}
    if ours != theirs:
        missing, unexpected = sorted(ours - theirs), sorted(theirs - ours)
        raise ValueError(
            f"Expected the state of an optimizer over the parameters of this one. Received: one without {missing[:5]} and with "
            f"{unexpected[:5]} in addition ({len(missing)} and {len(unexpected)} in all). Restore the optimizer, or add 'optimizer' to "
            "checkpoint.exclude_from_loading to begin afresh with the new one."
        )
    if sorted(map(sorted, names)) != sorted(map(sorted, stored)):
        raise ValueError(
            f"Expected the parameter groups of the checkpoint. Received: {len(names)} groups here, {len(stored)} stored, divided "
            "otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
        )


Options = list[dict[str, Any]]
"""The options in each parameter group, without the parameters."""

_COMPARED = ("lr", "weight_decay", "betas", "momentum", "eps")


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of every group, such as `lr` and `weight_decay`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def warn_if_replaced(asked: Options, loaded: Options, *, scheduled: bool) -> None:
    """Warn of options that a restored state has given another value than the program did. May be called on one rank."""
    replaced: dict[str, str] = {}
    for before, after in zip(asked, loaded):
        moved = {"lr", "momentum", "betas"} if "max_momentum" in after else {"lr"} if scheduled else set[str]()
        for name in _COMPARED:
            if name not in moved and name in before and name in after and before[name] != after[name]:
                replaced.setdefault(name, f"{name}={after[name]} (here {before[name]})")
    if replaced:
        logger.warning(
            "The optimizer goes on with the options of the checkpoint, which are not those of the program: %s. To have the program's, add "
            "'optimizer.param_groups' to checkpoint.exclude_from_loading.",
            ", ".join(replaced.values()),
        )


def adopt_options(optimizer: Optimizer, scheduler: object, options: Options, wanted: Callable[[str], bool]) -> None:
    """Put options into an optimizer that was restored. No communication: call it on every rank.

    A learning rate is the base rate of the schedule: the rate becomes the same fraction of the new one.
    """
    for group, own in zip(optimizer.param_groups, options):
        for name, value in own.items():
            if name not in ("lr", "initial_lr") and wanted(name):
                group[name] = value
    if not wanted("lr"):
        return
    rates = [group.get("initial_lr", group["lr"]) for group in options]
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


# Optimizers with other weights in training than to evaluate, as schedule-free ones


def modal(optimizer: object) -> list[Any]:
    """Return the optimizers with methods `train` and `eval`, which exchange the weights: of several in one, and inside of a wrapper."""
    if isinstance(optimizer, JointOptimizer):
        return [found for member in optimizer.optimizers for found in modal(member)]
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and type(optimizer).__module__.startswith("accelerate."):
        return modal(inner)  # its wrapper has both methods whatever it wraps
    has_both = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    return [optimizer] if has_both else []


def enter_training(optimizer: object) -> None:
    """Put the weights of training into the model. Outside of `evaluation_weights` they are always there."""
    for member in modal(optimizer):
        member.train()


@contextmanager
def evaluation_weights(optimizer: object) -> Iterator[None]:
    """Put the weights to evaluate into the model, and those of training back on exit, bit for bit.

    The optimizer computes each from the other with a rounding: a copy of the weights is kept, so that an evaluation leaves no trace.
    Where the weights to evaluate are there already, they stay, on exit too.
    """
    members = modal(optimizer)
    if not members:
        yield
        return
    found = _copies(members)
    trains = _are_training(members, found)
    if trains:
        for member in members:
            member.eval()
    try:
        yield
    finally:
        if trains:
            for member in members:
                member.train()
            _put(found)


def _are_training(members: list[Any], found: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether the weights of training are in the model: then `train` changes nothing."""
    for member in members:
        member.train()
    # NaN is not equal to itself, and does not count as changed.
    if all(bool(((parameter == value) | parameter.isnan()).all()) for parameter, value in found):
        return True
    for member in members:
        member.eval()
    _put(found)
    return False


def training_weights(optimizer: object) -> list[Tensor]:
    """Return the parameters whose weights of training are not those to evaluate.

    There are none before the first update, nor where the weights to evaluate are in the model: the optimizer computes the others.
    """
    members = [member for member in modal(optimizer) if member.state]
    return _parameters(members) if _are_training(members, _copies(members)) else []


def put_training_weights(optimizer: object, weights: list[tuple[Tensor, Tensor]]) -> None:
    """Enter training after a state was loaded, with the very weights that it was saved with."""
    enter_training(optimizer)
    _put(weights)


def _copies(members: list[object]) -> list[tuple[Tensor, Tensor]]:
    return [(parameter, parameter.detach().clone()) for parameter in _parameters(members)]


def _parameters(members: list[Any]) -> list[Tensor]:
    return [parameter for member in members for group in member.param_groups for parameter in group["params"]]


@torch.no_grad()
def _put(weights: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in weights:
        parameter.copy_(value)
