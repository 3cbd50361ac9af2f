"""Metric objects with states, as torchmetrics made them common: over several ranks, in a checkpoint, and beyond what `reset` forgets.

Their own synchronisation is not used: it needs the same states in the same number on every rank, and hangs or fails where a rank has
seen nothing. Every state of every rank is gathered in one collective instead.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from danling.distributed import Domain

_State = tuple[int, dict[str, Any]]
"""Updates seen, and the states by name, on the CPU."""
CPU = torch.device("cpu")
# What the library saves or restores in another way, or torchmetrics computes again.
_MANAGED = frozenset(
    {"_update_count", "_computed", "_forward_cache", "_cache", "_to_sync", "training"}
)
_LARGEST_ATTRIBUTE = 2**16
"""Most bytes of a tensor in an attribute that is saved: larger ones are data, such as weights of a network."""


def holders(metric: object) -> dict[str, Any]:
    """Return the parts of a metric object that hold states, by name: itself, members of a collection, the metric in a wrapper."""
    if not isinstance(metric, nn.Module):
        return {}
    return {
        name: part
        for name, part in metric.named_modules()
        if isinstance(getattr(part, "_reductions", None), dict)
    }


def parts_of(metric: object) -> dict[str, Any]:
    return holders(metric) or ({"": metric} if hasattr(metric, "__dict__") else {})


def attributes_of(metric: object) -> dict[str, dict[str, Any]]:
    """Return by part copies of the numbers and small tensors in attributes, without states of torchmetrics."""
    return {
        path: {
            key: value.detach().clone().cpu() if isinstance(value, Tensor) else value
            for key, value in vars(part).items()
            if is_attribute(part, key, value)
        }
        for path, part in parts_of(metric).items()
    }


def is_attribute(part: object, key: str, value: object) -> bool:
    if key in _MANAGED or key in getattr(part, "_defaults", ()):
        return False
    if isinstance(value, Tensor):
        return (
            type(value) is Tensor
            and value.layout == torch.strided
            and value.nbytes <= _LARGEST_ATTRIBUTE
        )
    return type(value) in (bool, int, float)


def is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def count_of(metric: object) -> object:
    parts = holders(metric)
    if parts:
        return sum(part._update_count for part in parts.values())
    # Other objects count nothing: a sum has another value, a list another length, a tensor another version.
    held = getattr(metric, "__dict__", {}).items()
    numbers = [(key, value) for key, value in held if isinstance(value, (bool, int, float))]
    lengths = [(key, len(value)) for key, value in held if isinstance(value, (list, dict))]
    versions = [(key, value._version) for key, value in held if isinstance(value, Tensor)]
    return (*numbers, *lengths, *versions)


def compute_metric(metric: Any, domain: Domain | None, *, seen: bool) -> object:
    """Compute a metric object over a domain, and leave its own states as they are; `None` where nothing was seen. Call on all members."""
    parts = holders(metric)
    several = domain if domain is not None and domain.size > 1 else None
    if not parts and several is not None:
        return _compute_merged(metric, several, seen)
    if not parts:
        return metric.compute() if seen else None
    owners = owners_of(metric)
    members: dict[str, list[_State]] = {}
    has_data = any(_updates_of(part, seen) for part in owners.values())
    if several is not None:
        members = _states_of_all(owners, several, seen)
        has_data = any(members.values())
    if not has_data:
        return None
    # With `_to_sync` set, `compute` would gather the states once more; `_computed` is the result of an earlier call.
    synced = [(part, part._to_sync, part._computed) for part in parts.values()]
    own = [
        (part, part._update_count, {key: getattr(part, key) for key in part._reductions})
        for part in owners.values()
    ]
    try:
        for part in parts.values():
            part._to_sync, part._computed = False, None
        for name, states in members.items():
            # A part that no member has updated, such as one of a wrapper, keeps its beginning.
            if states:
                _put(owners[name], *_merged(owners[name], states))
        return metric.compute()
    finally:
        for each in own:
            _put(*each)
        for part, to_sync, computed in synced:
            part._to_sync, part._computed = to_sync, computed


def _compute_merged(metric: Any, domain: Domain, seen: bool) -> object:
    mine = metric
    if seen and hasattr(metric, "to"):
        # A tensor that was pickled on one accelerator would come back there on every rank.
        mine = copy.deepcopy(metric).to("cpu")
    members = [
        member for member in domain.gather_objects((mine,) if seen else None) if member is not None
    ]
    if not members:
        return None
    (first,), *others = members
    for (other,) in others:
        first.merge_state(other)
    return first.compute()


def merged_state(metric: Any, domain: Domain | None, *, seen: bool) -> dict[str, list[Any]]:
    """Return what all members have seen: by part, the number of updates and the states on the CPU. Call on all members."""
    owners = owners_of(metric)
    ranks = _states_of_all(owners, domain, seen)
    merged = {name: _merged(owners[name], states) for name, states in ranks.items() if states}
    return {name: [count, moved(states, CPU)] for name, (count, states) in merged.items()}


def load_state(metric: Any, state: Mapping[str, Sequence[Any]]) -> None:
    """Restore what `merged_state` returned; a part that it lacks is left as it is."""
    for name, part in owners_of(metric).items():
        if name in state:
            count, states = state[name]
            # What several ranks have listed was merged into one tensor; more is appended to a list.
            lists = [key for key, default in part._defaults.items() if isinstance(default, list)]
            states = {
                key: [value] if key in lists and isinstance(value, Tensor) else value
                for key, value in states.items()
            }
            # Merged with nothing else, which moves them to the device of the part.
            _put(part, *_merged(part, [(count, states)]))


def owners_of(metric: nn.Module) -> dict[str, Any]:
    collections: list[Any] = [part for part in metric.modules() if hasattr(part, "compute_groups")]
    for part in collections:
        # A collection updates one metric of each group and hands its states to the others when they are asked for.
        part.items(keep_base=True, copy_state=False)
    parts = holders(metric)
    # A wrapper may show the states of what it wraps as its own, with a count of updates that is not theirs; the inner one comes later.
    owners = {id(part._reductions): name for name, part in parts.items() if part._reductions}
    return {name: parts[name] for name in owners.values()}


def _updates_of(part: Any, seen: bool) -> int:
    """Return how many updates a part has had; at least 1 of one that does not count them, where the metric has had some."""
    # torchmetrics wraps `update` where it counts: not in `torchmetrics.wrappers.Running`.
    is_counted = hasattr(vars(part).get("update"), "__wrapped__")
    return int(part._update_count) or int(seen and not is_counted)


def _states_of_all(
    owners: Mapping[str, Any], domain: Domain | None, seen: bool
) -> dict[str, list[_State]]:
    """Return the states of the members that have seen something, by part. Call on all members."""
    mine: dict[str, _State] = {}
    for name, part in owners.items():
        count = _updates_of(part, seen)
        mine[name] = (
            count,
            {key: moved(getattr(part, key), CPU) for key in part._reductions} if count else {},
        )
    gathered = [mine] if domain is None else domain.gather_objects(mine)
    return {name: [states[name] for states in gathered if states[name][0]] for name in owners}


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value


def _put(part: Any, count: int, states: Mapping[str, object]) -> None:
    part._update_count = count
    for name, value in states.items():
        setattr(part, name, value)


def _merged(part: Any, ranks: Sequence[_State]) -> tuple[int, dict[str, Any]]:
    """Return the states of several ranks, each of which has seen data, as one, with their number of updates."""
    device, states = torch.device(getattr(part, "device", "cpu")), [states for _, states in ranks]
    merged = states[0]
    # Of one member the states are as they are: a reduction of one tensor may change its shape.
    if len(states) > 1:
        merged = {
            key: _reduced(reduction, [each[key] for each in states])
            for key, reduction in part._reductions.items()
        }
    return sum(count for count, _ in ranks), moved(merged, device)


def _reduced(reduction: Any, values: Sequence[Any]) -> object:
    """Reduce one state over ranks, as torchmetrics does: tensors are stacked, lists joined, then the reduction is applied."""
    joined: Any
    if all(isinstance(value, Tensor) for value in values):
        if getattr(reduction, "__name__", "") == "dim_zero_cat":
            return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])
        joined = torch.stack(list(values))
    else:
        joined = [
            item
            for value in values
            for item in (value if isinstance(value, (list, tuple)) else [value])
        ]
        if not joined:
            return joined
    return joined if reduction is None else reduction(joined)
