"""Optimizer state by parameter name: it depends neither on the order of the parameters nor on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from danling.utils.tensors import canonical_name

from .stored_kind import check_kind
from .tensor_subclasses import from_parts, to_parts


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
        "state": {flat[index]: _in_parts(state) for index, state in plain["state"].items()},
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
    values = {index_of[name]: _clone(entry) for name, entry in state["state"].items()}
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _check_groups(names: list[list[str]], stored: list[list[str]]) -> None:
    ours = {name for group in names for name in group}
    theirs = {name for group in stored for name in group}
    if ours != theirs:
        missing, unexpected = sorted(ours - theirs), sorted(theirs - ours)
        raise ValueError(
            f"Expected the state of an optimizer over the parameters of this one. Received: one without {missing[:5]} and with "
            f"{unexpected[:5]} besides ({len(missing)} and {len(unexpected)} in all). Restore the optimizer, or add 'optimizer' to "
            "checkpoint.exclude_from_loading to begin afresh with the new one."
        )
    if sorted(map(sorted, names)) != sorted(map(sorted, stored)):
        raise ValueError(
            f"Expected the parameter groups of the checkpoint. Received: {len(names)} groups here, {len(stored)} stored, divided "
            "otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
        )


def _clone(entry: Mapping[str, object]) -> dict[str, object]:
    # An optimizer keeps tensors of the right dtype and device as they are: without a copy the caller's would change in training.
    return {key: from_parts(value) for key, value in entry.items()}


def _in_parts(entry: Mapping[str, object]) -> dict[str, object]:
    return {key: to_parts(value) for key, value in entry.items()}
