"""What a save runs through: the state of an optimizer by parameter name, its options, and which of two sets of weights is in the model."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.utils.encoding import (
    ARRAYS,
    MISSING,
    SETS,
    decode_array,
    decode_set,
    encode_array,
    encode_set,
    is_of_numpy,
    numpy_as,
    without_numpy,
)
from danling.utils.tensors import (
    canonical_name,
    is_sharded,
    local_part,
    shard_like,
    with_local_part,
)

from .joint import OWN, SHARED, JointOptimizer, JointScheduler, added_to

logger = logging.getLogger("danling")

_CLASS, _PARTS, _CONTEXT, _SHAPE, _STRIDE = "tensor_class", "parts", "context", "shape", "stride"


def to_inner_tensors(value: object) -> object:
    """Return a tensor that is made of others as a mapping of these and what puts them together; anything else as it is.

    It is such as `torch.compile` takes apart: with `__tensor_flatten__`. A DTensor is left, since checkpoints know it.
    """
    if (
        not isinstance(value, Tensor)
        or is_sharded(value)
        or not is_traceable_wrapper_subclass(value)
    ):
        return value
    names, context = value.__tensor_flatten__()
    kind = type(value)
    return {
        _CLASS: f"{kind.__module__}:{kind.__qualname__}",
        _PARTS: {name: to_inner_tensors(getattr(value, name)) for name in names},
        _CONTEXT: context,
        _SHAPE: list(value.shape),
        _STRIDE: list(value.stride()),
    }


def from_inner_tensors(value: object) -> object:
    """Return a copy of the value that `to_inner_tensors` took apart; of a plain tensor too.

    Only loaded modules are searched for the class: the program that made the optimizer has it, and no file decides on imports.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if not isinstance(value, Mapping) or _CLASS not in value:
        return value
    parts = {name: from_inner_tensors(part) for name, part in value[_PARTS].items()}
    kind = _class(str(value[_CLASS]))
    return kind.__tensor_unflatten__(
        parts, value[_CONTEXT], torch.Size(value[_SHAPE]), tuple(value[_STRIDE])
    )


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    # A dotted path would lead through other objects.
    found = getattr(found, path, None) if path.isidentifier() else None
    if not (
        isinstance(found, type)
        and issubclass(found, Tensor)
        and hasattr(found, "__tensor_unflatten__")
    ):
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
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, object]],
    stored_groups: Iterable[Mapping[str, object]],
) -> None:
    """Refuse the state of another kind of optimizer, which torch would take in and fail over in the next update, or never.

    The options of its groups are all that torch stores of an optimizer's kind.
    """
    for group, stored in zip(groups, stored_groups):
        others = (set(group) ^ set(stored)) - HOW - OF_SCHEDULES - {_DECOUPLED}
        known = _DECOUPLED in stored and _DECOUPLED in group
        if others & _OPTIONS_OF_TORCH or (
            known and bool(stored[_DECOUPLED]) != bool(group[_DECOUPLED])
        ):
            shown = (name for name in stored if name not in {"params", *HOW, *OF_SCHEDULES})
            raise ValueError(
                f"Expected the state of {type(optimizer).__name__}, the optimizer of this run. Received: that of another one, with "
                f"{', '.join(f'{name}={stored[name]}' for name in shown)}. Restore the optimizer, or add 'optimizer' to "
                "checkpoint.exclude_from_loading to start with a new optimizer state."
            )


def parameter_names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[list[str]]:
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


# Entries that an optimizer's own `state_dict` adds, such as the slow weights of Lookahead

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: Mapping[str, type[Any]] = {"list": list, "tuple": tuple}


def _packed(value: object, path: str, parameters: Mapping[str, Tensor]) -> object:
    """Return nested values as mappings with text keys, which every kind of checkpoint takes.

    A tensor that is divided over the ranks is given with the name of a parameter that is divided alike.
    """
    if isinstance(value, Tensor) and is_sharded(value):
        alike = (
            name for name, parameter in parameters.items() if _layout(parameter) == _layout(value)
        )
        return {"kind": "shards", "like": next(alike, None), "value": value}
    if isinstance(value, Tensor):
        return to_inner_tensors(value)
    if type(value) in _PLAIN:
        return value
    if is_of_numpy(value) and (array := encode_array(value)) is not None:
        return array
    if type(value) in (set, frozenset) and MISSING not in (encoded := encode_set(value))["items"]:
        return encoded
    node: dict[str, object] = {"kind": type(value).__name__}
    values: Iterable[Any]
    if isinstance(value, Mapping) and all(type(key) in _PLAIN for key in value):
        node, values = {"kind": "dict", "keys": list(value)}, value.values()
    elif type(value) in _SEQUENCES.values():
        values = value  # type: ignore[assignment]
    else:
        raise ValueError(
            f"Expected the optimizer's state_dict() to return tensors, numbers, text and containers of these. Received: {path} of type "
            f"{type(value).__name__}. Return its own state_dict() there, or leave it out."
        )
    keys = node.get("keys", itertools.count())
    items = [_packed(item, f"{path}[{key!r}]", parameters) for key, item in zip(keys, values)]  # type: ignore[call-overload]
    return {**node, "items": {str(number): item for number, item in enumerate(items)}}


def _layout(tensor: Tensor) -> object:
    return (tensor.shape, tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]


def _unpacked(node: object, parameters: Mapping[str, Tensor]) -> Any:
    """Return what `_packed` was given, divided over the ranks as the parameters are now."""
    if not isinstance(node, Mapping) or "kind" not in node:
        return from_inner_tensors(node)
    if node["kind"] == "shards":
        found, like = from_inner_tensors(node["value"]), parameters.get(node["like"])
        if (
            like is not None
            and isinstance(found, Tensor)
            and found.shape == local_part(like).shape != like.shape
        ):
            return with_local_part(like, found)  # from the same rank of another replica group
        return found if like is None else shard_like(found, like)  # type: ignore[arg-type]
    if node["kind"] in ARRAYS:
        return decode_array(node)
    if node["kind"] in SETS:
        return decode_set(node)
    items = (
        _unpacked(node["items"][str(number)], parameters) for number in range(len(node["items"]))
    )
    if node["kind"] == "dict":
        return dict(zip(node["keys"], items))
    return _SEQUENCES[node["kind"]](items)


def added_names(optimizer: Any) -> list[str]:
    """Return the names of what an optimizer's `state_dict` has that is not of one parameter."""
    return [str(key) for entries in added_to(optimizer.state_dict()).values() for key in entries]


def named_state_dict(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, object]:
    """Return `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`; tensors are not copied.

    What the optimizer's own `state_dict` adds is under `shared` and `own`. A tensor that is made of others, such as a moment in 8 bits, is
    given by these."""
    named_parameters = list(named_parameters)
    names = parameter_names(optimizer, named_parameters)
    plain = optimizer.state_dict()
    flat = {
        index: name
        for group, labels in zip(plain["param_groups"], names)
        for index, name in zip(group["params"], labels)
    }
    parameters = {canonical_name(name): parameter for name, parameter in named_parameters}
    added = {
        key: _packed(values, key, parameters) for key, values in added_to(plain).items() if values
    }
    return {
        "state": {
            flat[index]: {key: to_inner_tensors(value) for key, value in state.items()}
            for index, state in plain["state"].items()
            if index in flat
        },
        "param_groups": [
            {**without_numpy(group), "params": labels}
            for group, labels in zip(plain["param_groups"], names)
        ],
        **added,
    }


def load_named_state_dict(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    converted: Collection[str] = (),
) -> None:
    """Restore what `named_state_dict` returned; parameters are matched by name, groups by the names they hold.

    Args:
        optimizer: Where to.
        state: What `named_state_dict` returned.
        named_parameters: The parameters of the model.
        converted: Names of parameters whose dtype is another one than when the state was saved: their state takes the new one.
    """
    named_parameters = list(named_parameters)
    names = parameter_names(optimizer, named_parameters)
    stored = [list(group["params"]) for group in state["param_groups"]]
    _check_groups(names, stored)
    plain = optimizer.state_dict()
    index_of = {
        name: i
        for group, labels in zip(plain["param_groups"], names)
        for i, name in zip(group["params"], labels)
    }
    groups = []
    for i, (group, labels) in enumerate(zip(plain["param_groups"], names)):
        # The same place first: several groups may be empty where this process holds a part of the model.
        candidates = [state["param_groups"][i], *state["param_groups"]]
        match = next(entry for entry in candidates if set(entry["params"]) == set(labels))
        own = {name: numpy_as(value, group.get(name)) for name, value in match.items()}
        groups.append({**own, "params": group["params"]})
    check_kind(optimizer, plain["param_groups"], groups)
    # Copies: an optimizer keeps tensors of the right dtype and device as they are, and the caller's would change in training.
    values = {
        index_of[name]: {key: from_inner_tensors(value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    added = added_to(plain)
    absent = [str(key) for key in added[OWN] if OWN not in state and state["state"]]
    if absent:
        logger.warning(
            "The checkpoint does not contain %s of the optimizer, which keeps what it begins with.",
            ", ".join(absent),
        )
    parameters = {canonical_name(name): parameter for name, parameter in named_parameters}
    for key in (SHARED, OWN):
        if key in state:
            added[key] = _unpacked(state[key], parameters)
    shared = [
        (name, inner)
        for name, inner in inner_optimizers(optimizer)
        if _shares_groups(optimizer, inner)
    ]
    optimizer.load_state_dict(
        {**added[OWN], "state": {**values, **added[SHARED]}, "param_groups": groups}
    )
    parted = [f"optimizer.{name}" for name, inner in shared if not _shares_groups(optimizer, inner)]
    if parted:
        logger.warning(
            "%s had the parameter groups of the optimizer that it belongs to. load_state_dict has replaced these, so that a schedule does "
            "not reach it any more. Assign them again in an override of load_state_dict: self.%s.param_groups = self.param_groups.",
            ", ".join(parted),
            parted[0].removeprefix("optimizer."),
        )
    same = {
        name: parameter.dtype for name, parameter in parameters.items() if name not in converted
    }
    dtypes = {index: same[name] for name, index in index_of.items() if name in same}
    restore_dtypes(optimizer.state_dict()["state"], values, dtypes)


def inner_optimizers(optimizer: object) -> Iterator[tuple[str, Optimizer]]:
    """Yield by name the optimizers that are attributes of an optimizer, such as that which SAM steps."""
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from (
                (f"{name}[{index}]", each)
                for index, each in enumerate(value)
                if isinstance(each, Optimizer)
            )


def _shares_groups(optimizer: Optimizer, inner: Optimizer) -> bool:
    groups, others = optimizer.param_groups, inner.param_groups
    return len(groups) == len(others) and all(
        group is other for group, other in zip(groups, others)
    )


@contextmanager
def own_dtypes(optimizer: Any) -> Iterator[None]:
    """Have `load_state_dict` of an optimizer restore its state in the dtypes that it was saved with, within the context."""
    given: list[Mapping[str, Any]] = []

    def restore(_: object) -> None:
        indices = [index for group in given[-1]["param_groups"] for index in group["params"]]
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        dtypes = {index: parameter.dtype for index, parameter in zip(indices, parameters)}
        loaded = {
            index: optimizer.state.get(parameter) for index, parameter in zip(indices, parameters)
        }
        restore_dtypes(loaded, given[-1]["state"], dtypes)

    before = optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    after = optimizer.register_load_state_dict_post_hook(restore)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def restore_dtypes(
    loaded: Mapping[Any, Any],
    stored: Mapping[Any, Mapping[str, Any]],
    dtypes: Mapping[Any, torch.dtype],
) -> None:
    """Put values that torch has cast to the dtype of their parameter back, in place.

    Args:
        loaded: The state of each parameter as it was loaded, by index.
        stored: The same as it was saved.
        dtypes: The dtype of each parameter; one that is left out is not looked at.
    """
    for index, dtype in dtypes.items():
        there, saved = loaded.get(index), stored.get(index)
        if isinstance(there, dict) and isinstance(saved, Mapping):
            for key in saved.keys() & there.keys() - {
                "step"
            }:  # torch has its own rules for the number of steps
                there[key] = _in_own_dtype(saved[key], there[key], dtype)


def _in_own_dtype(stored: Any, loaded: Any, cast: torch.dtype) -> Any:
    """Return a loaded value in the dtype that it was saved with: torch casts all tensors to the dtype of their parameter."""
    if isinstance(stored, Tensor) and isinstance(loaded, Tensor):
        # Anything but that cast is a decision of the optimizer's own `load_state_dict`.
        return stored.to(loaded.device) if loaded.dtype == cast != stored.dtype else loaded
    if isinstance(stored, str):
        return stored  # torch makes the text of a generator of it
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return {
            key: _in_own_dtype(stored[key], item, cast) if key in stored else item
            for key, item in loaded.items()
        }
    if (
        isinstance(stored, (list, tuple))
        and type(loaded) is type(stored)
        and len(stored) == len(loaded)
    ):
        return type(stored)(
            _in_own_dtype(before, item, cast) for before, item in zip(stored, loaded)
        )
    return loaded


def _check_groups(names: list[list[str]], stored: list[list[str]]) -> None:
    ours = {name for group in names for name in group}
    theirs = {name for group in stored for name in group}
    if ours != theirs:
        missing, unexpected = sorted(ours - theirs), sorted(theirs - ours)
        raise ValueError(
            f"Expected the state of an optimizer over the parameters of this one. Received: one without {missing[:5]} and with "
            f"{unexpected[:5]} in addition ({len(missing)} and {len(unexpected)} in all). Restore the optimizer, or add 'optimizer' to "
            "checkpoint.exclude_from_loading to start with a new optimizer state."
        )
    if sorted(map(sorted, names)) != sorted(map(sorted, stored)):
        raise ValueError(
            f"Expected the parameter groups of the checkpoint. Received: {len(names)} groups here, {len(stored)} stored, divided "
            "otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
        )


Options = list[dict[str, Any]]
"""The options in each parameter group, without the parameters."""


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of every group, such as `lr` and `weight_decay`."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def rebuilt(scheduler: Any, optimizer: Optimizer, build: Callable[[], Any]) -> Any:
    """Return a schedule that is built anew, at the position of another one. No communication: call it on every rank.

    As in a resume, the new one has its own length, and the optimizer keeps the options that building has replaced.
    """
    # Constructing a schedule writes rates, and some schedules the momentum, into the groups.
    kept = copy.deepcopy(options_of(optimizer))
    state = scheduler.state_dict()
    try:
        new = build()
    finally:
        for group, options in zip(optimizer.param_groups, kept):
            for name, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
    if new is not None:
        new.load_state_dict(state)
    return new


def put_beginning_of_schedule(
    optimizer: Optimizer, scheduler: object, options: Options, excluded: Collection[str]
) -> None:
    """Put what a schedule that begins has written into the groups into an optimizer that was restored. No communication.

    The rates of the checkpoint are those of the schedule that is left out: torch's schedules would multiply them further.
    """
    named = scheduler.schedules if isinstance(scheduler, JointScheduler) else {}
    begins = [schedule for name, schedule in named.items() if f"scheduler.{name}" in excluded]
    of_these = {id(group) for schedule in begins for group in schedule.optimizer.param_groups}
    for group, own in zip(optimizer.param_groups, options):
        if "scheduler" not in excluded and id(group) not in of_these:
            continue
        moved = {"lr", *OF_SCHEDULES}
        if "max_momentum" in own:
            moved |= {"momentum", "betas"}
        group.update({name: own[name] for name in moved & own.keys()})


def put_rates_of(scheduler: Any) -> None:
    """Put the rates of a schedule into its optimizer, of which only the schedule was restored. No communication."""
    for each in scheduler if isinstance(scheduler, JointScheduler) else [scheduler]:
        parts = (each, *getattr(each, "_schedulers", ()))
        bases = next((part.base_lrs for part in parts if hasattr(part, "base_lrs")), ())
        for group, base, rate in zip(
            each.optimizer.param_groups if bases else (), bases, getattr(each, "_last_lr", ())
        ):
            if not isinstance(group["lr"], Tensor):
                group.update(lr=rate, initial_lr=base)


def adopt_options(
    optimizer: Optimizer, scheduler: object, options: Options, wanted: Callable[[str], bool]
) -> None:
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
            part.base_lrs = [
                rate_of.get(id(group), base) for group, base in zip(groups, part.base_lrs)
            ]
            # What `get_last_lr` returns until the schedule advances.
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
    return [
        parameter
        for member in members
        for group in member.param_groups
        for parameter in group["params"]
    ]


@torch.no_grad()
def _put(weights: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in weights:
        parameter.copy_(value)


def rates_of(optimizer: Any) -> list[float | None]:
    """Return the learning rate of each group; `None` for one that the optimizer computes itself, as Adafactor with `lr=None`."""
    rates = (group.get("lr") for group in getattr(optimizer, "param_groups", ()))
    return [None if rate is None else float(rate) for rate in rates]
