"""Temporarily gathers weights that are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from danling.utils.tensors import is_sharded, whole


@contextmanager
def wholly(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Replace divided parameters of a model by whole, plain ones; on exit the own ones are put back. Enter on all ranks of its meshes.

    Args:
        model: The model, or this rank's part of it, resharded.

    Returns:
        Pairs of the model's own parameter and its stand-in, which is the same object if it is not divided.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    owners = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
    ]
    for module, name, own in owners:
        if own not in stand_ins:
            stand_ins[own] = nn.Parameter(whole(own.detach()), own.requires_grad) if is_sharded(own) else own
        # Not by `setattr`, which modules of FSDP override.
        module._parameters[name] = stand_ins[own]
    try:
        yield list(stand_ins.items())
    finally:
        for module, name, own in owners:
            module._parameters[name] = own
