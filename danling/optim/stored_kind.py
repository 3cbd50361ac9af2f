"""Whether a stored state is of this kind of optimizer: told by the options of its groups, which are all that torch stores of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .joint import JointOptimizer

HOW = frozenset({"foreach", "fused", "maximize", "capturable", "differentiable"})
"""Options that versions of torch have added to optimizers, and which torch itself completes in an older state."""

_DECOUPLED = "decoupled_weight_decay"
"""The option in which Adam and AdamW differ; older versions of torch have not stored it."""

OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


def check_kind(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], stored_groups: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse the state of another kind of optimizer, which torch would take in and fail over in the next update, or never."""
    for group, stored, member in zip(groups, stored_groups, _member_of_each_group(optimizer)):
        lacks = set(getattr(member, "defaults", ())) - set(stored) - HOW - {_DECOUPLED}
        unknown = set(stored) - set(group) - HOW - OF_SCHEDULES
        kind = _kind_of(stored)
        foreign = unknown & set(kind.defaults) if kind is not None else set[str]()
        other_decay = bool(stored.get(_DECOUPLED)) != bool(group.get(_DECOUPLED)) and {
            _DECOUPLED
        } <= stored.keys() & set(group)
        if lacks or foreign or other_decay:
            options = ", ".join(
                f"{name}={stored[name]}" for name in stored if name not in {"params", *HOW, *OF_SCHEDULES}
            )
            raise ValueError(
                f"Expected the state of {type(member).__name__}, the optimizer of this run. Received: that of "
                f"{type(kind).__name__ if kind is not None else 'another one'} ({options}). Restore the optimizer, or add 'optimizer' to "
                "checkpoint.exclude_from_loading to begin afresh with the new one."
            )


def _member_of_each_group(optimizer: Any) -> list[Optimizer]:
    """Return the optimizer that steps each group: of several in one, and inside of a wrapper."""
    if isinstance(optimizer, JointOptimizer):
        return [found for member in optimizer.optimizers for found in _member_of_each_group(member)]
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _member_of_each_group(inner)
    return [optimizer] * len(optimizer.param_groups)


def _kind_of(stored: Mapping[str, Any]) -> Optimizer | None:
    """Return an optimizer of torch whose options are the stored ones, as far as they tell."""
    names = set(stored) - {"params"} - OF_SCHEDULES - HOW - {_DECOUPLED}
    for kind in vars(torch.optim).values():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer):
            continue
        try:
            made = kind([torch.zeros(1, 1)])  # type: ignore[call-arg]
        except (TypeError, ValueError):
            continue
        decoupled = stored.get(_DECOUPLED, made.defaults.get(_DECOUPLED))
        if set(made.defaults) - HOW - {_DECOUPLED} == names and made.defaults.get(_DECOUPLED) == decoupled:
            return made
    return None
