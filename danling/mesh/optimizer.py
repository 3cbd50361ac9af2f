"""An optimizer over parameters that a device mesh has replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from danling.distributed import Domain
from danling.utils.tensors import canonical_name, is_sharded


def rebind_optimizer(
    optimizer: Any,
    names: Mapping[int, str],
    model: nn.Module,
    kept: Iterable[nn.Parameter],
    *,
    pipeline: Domain,
) -> None:
    """Point an optimizer that the user made at the parameters that stand where those stood which it was made for."""
    if optimizer.state:
        raise ValueError(
            "Expected an optimizer without a state at the end of __init__: the parallel stack replaces the parameters it was made for. "
            f"Received: a {type(optimizer).__name__} that has stepped. Let the runner restore it from a checkpoint."
        )
    now = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    known = {id(parameter) for parameter in kept}
    trained = 0
    for group in optimizer.param_groups:
        # A parameter of another stage has no successor here.
        found = [now.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"] = [p for p in found if p is not None]
        trained += sum(id(p) in known for p in group["params"])
    if not sum(pipeline.gather_objects(trained)):
        raise ValueError(
            f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} that would train "
            "nothing. Make it over self.model.parameters(), after the model is complete, or set `optim.type` and let the runner "
            "build it."
        )
    keep_kinds_apart(optimizer)


def keep_kinds_apart(optimizer: Any) -> None:
    """Update parameters one by one where those of a group lie on different meshes, since one call cannot take them together."""
    for group in optimizer.param_groups:
        kinds = {p.device_mesh if is_sharded(p) else None for p in group["params"]}
        if len(kinds) > 1:
            for option in ("foreach", "fused"):
                if option in group:
                    group[option] = False
