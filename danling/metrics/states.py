"""Metric objects of the kind that torchmetrics made common, computed over a domain.

Their own synchronisation is left out: it needs the same states in the same number on every rank, and hangs or fails where a rank has
seen nothing. Instead every state of every rank is gathered in one collective and reduced as the metric says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from danling.utils.protocols import ReductionDomain

# Updates seen, and the states by name, on the CPU.
_State = tuple[int, dict[str, Any]]


def can_merge(metric: object) -> bool:
    """Whether a metric object can be computed over several ranks."""
    return bool(holders(metric)) or callable(getattr(metric, "merge_state", None))


def holders(metric: object) -> dict[str, object]:
    """Return the parts of a metric object that hold states, by name: itself, members of a collection, what a wrapper wraps."""
    if not isinstance(metric, nn.Module):
        return {}
    return {name: part for name, part in metric.named_modules() if isinstance(getattr(part, "_reductions", None), dict)}


def compute_metric(metric: Any, domain: ReductionDomain | None, *, seen: bool) -> object:
    """Compute a metric object over a domain, and leave its own states as they are. Call on all members."""
    parts = holders(metric)
    if parts:
        return _compute_states(metric, parts, domain)
    if domain is None or domain.size == 1:
        return metric.compute() if seen else None
    return _compute_merged(metric, domain, seen)


def _compute_states(metric: Any, parts: Mapping[str, Any], domain: ReductionDomain | None) -> object:
    _link_compute_groups(metric)
    owners = _owners(parts)
    if domain is None or domain.size == 1:
        if not any(part._update_count for part in owners.values()):
            return None
        with _unsynchronised(parts.values()):
            return metric.compute()
    gathered: list[dict[str, _State]] = domain.gather_objects({name: _read(part) for name, part in owners.items()})
    members = {name: [states[name] for states in gathered if states[name][0]] for name in owners}
    if not any(members.values()):
        return None
    with _unsynchronised(parts.values()), _replaced(owners, members):
        return metric.compute()


def merged_state(metric: Any, domain: ReductionDomain | None) -> dict[str, list[Any]]:
    """Return what all members have seen: by part, the number of updates and the states on the CPU. Call on all members."""
    _link_compute_groups(metric)
    owners = _owners(holders(metric))
    mine = {name: _read(part) for name, part in owners.items()}
    gathered = [mine] if domain is None else domain.gather_objects(mine)
    members = {name: [states[name] for states in gathered if states[name][0]] for name in owners}
    return {
        name: [sum(count for count, _ in seen), _on_cpu_all(_merged(owners[name], [states for _, states in seen]))]
        for name, seen in members.items()
        if seen
    }


def load_state(metric: Any, state: Mapping[str, Sequence[Any]]) -> None:
    """Restore what `merged_state` returned; a part that it lacks is left as it is."""
    for name, part in _owners(holders(metric)).items():
        if name in state:
            count, states = state[name]
            # What several ranks have listed was merged into one tensor; more is appended to a list.
            lists = [key for key, default in part._defaults.items() if isinstance(default, list)]
            states = {
                key: [value] if key in lists and isinstance(value, Tensor) else value for key, value in states.items()
            }
            _put(part, count, _merged(part, [states]))


def _on_cpu_all(states: Mapping[str, object]) -> dict[str, object]:
    return {name: _on_cpu(value) for name, value in states.items()}


def _owners(parts: Mapping[str, Any]) -> dict[str, Any]:
    # A wrapper may show the states of what it wraps as its own, with a count of updates that is not theirs; the inner one comes later.
    owners = {id(part._reductions): name for name, part in parts.items() if part._reductions}
    return {name: parts[name] for name in owners.values()}


def _link_compute_groups(metric: nn.Module) -> None:
    # A collection updates one metric of each group and hands its states to the others when they are asked for.
    collections: list[Any] = [part for part in metric.modules() if hasattr(part, "compute_groups")]
    for part in collections:
        part.items(keep_base=True, copy_state=False)


def _read(part: Any) -> _State:
    count = int(part._update_count)
    return count, {name: _on_cpu(getattr(part, name)) for name in part._reductions} if count else {}


def _on_cpu(value: object) -> object:
    return _moved(value, torch.device("cpu"))


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


@contextmanager
def _unsynchronised(parts: Any) -> Iterator[None]:
    before = [(part, part._to_sync, part._computed) for part in parts]
    try:
        for part, _, _ in before:
            part._to_sync, part._computed = False, None
        yield
    finally:
        for part, to_sync, computed in before:
            part._to_sync, part._computed = to_sync, computed


@contextmanager
def _replaced(parts: Mapping[str, Any], members: Mapping[str, Sequence[_State]]) -> Iterator[None]:
    """Put the merged states into the parts for a while."""
    before = {
        name: (part._update_count, {key: getattr(part, key) for key in part._reductions})
        for name, part in parts.items()
    }
    try:
        for name, part in parts.items():
            if members[name]:
                _put(
                    part,
                    sum(count for count, _ in members[name]),
                    _merged(part, [states for _, states in members[name]]),
                )
        yield
    finally:
        for name, part in parts.items():
            _put(part, *before[name])


def _put(part: Any, count: int, states: Mapping[str, object]) -> None:
    part._update_count = count
    for name, value in states.items():
        setattr(part, name, value)


def _merged(part: Any, ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the states of several ranks, each of which has seen data, as one."""
    device = torch.device(getattr(part, "device", "cpu"))
    merged = (
        ranks[0] if len(ranks) == 1 else {k: _reduced(fn, [r[k] for r in ranks]) for k, fn in part._reductions.items()}
    )
    return {name: _moved(value, device) for name, value in merged.items()}


def _reduced(reduction: Any, values: Sequence[Any]) -> object:
    """Reduce one state over ranks, as torchmetrics does: tensors are stacked, lists joined, then the reduction is applied."""
    joined: Any
    if all(isinstance(value, Tensor) for value in values):
        if getattr(reduction, "__name__", "") == "dim_zero_cat":
            return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])
        joined = torch.stack(list(values))
    else:
        joined = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        if not joined:
            return joined
    return joined if reduction is None else reduction(joined)


def _compute_merged(metric: Any, domain: ReductionDomain, seen: bool) -> object:
    mine = metric
    if seen and hasattr(metric, "to"):
        # A tensor that was pickled on one accelerator would come back there on every rank.
        mine = copy.deepcopy(metric).to("cpu")
    members = [member for member in domain.gather_objects((mine,) if seen else None) if member is not None]
    if not members:
        return None
    (first,), *others = members
    for (other,) in others:
        first.merge_state(other)
    return first.compute()
