"""Weights that are divided over ranks, put together for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from danling.utils.tensors import is_sharded, whole


@contextmanager
def wholly(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Put plain parameters of full shape in the place of a model's own, and its own back on exit. Enter on all ranks of its meshes.

    Args:
        model: The model, or this rank's part of it, resharded.

    Returns:
        For every parameter the model's own and the one that stands in its place, which is the same one where it is not divided.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    owners = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
    ]
    for module, name, own in owners:
        if own not in stand_ins:
            stand_ins[own] = nn.Parameter(whole(own.detach()), own.requires_grad) if is_sharded(own) else own
        # Not by setattr, which modules of FSDP watch.
        module._parameters[name] = stand_ins[own]
    try:
        yield list(stand_ins.items())
    finally:
        for module, name, own in owners:
            module._parameters[name] = own
