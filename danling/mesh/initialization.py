"""Weights for a model, or a part of one, that was built on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from danling.data import derive_seed, seed_streams
from danling.training.keys import preserved_streams

from .axes import axes_with
from .topology import Topology


def initialize_weights(part: nn.Module, topology: Topology, *, seed: int, number: int = 0) -> None:
    """Call the model's `init_weights()`, else `reset_parameters()` of every module that has parameters or buffers of its own.

    Each coordinate, and each part of a rank by its `number`, draws from streams of its own; copies are made equal afterwards.
    """
    # The seeds of a run depend on this order: modules first, then pieces of tensors.
    axes = [axis for cut in (True, False) for axis in axes_with(divides_parameters=True, cuts_modules=cut)]
    own_seed = derive_seed(seed, "initialization", *(topology.coordinate[axis] for axis in axes), number)
    with preserved_streams(topology.device), torch.no_grad():
        seed_streams(own_seed, topology.device)
        whole = getattr(part, "init_weights", None)
        if callable(whole):
            whole()
            return
        owners = {name: m for name, m in part.named_modules() if m._parameters or m._buffers}
        silent = [name or type(m).__name__ for name, m in owners.items() if not hasattr(m, "reset_parameters")]
        if silent:
            raise ValueError(
                f"Expected a model that was built on the meta device to have `init_weights()`, or `reset_parameters()` on every module "
                f"with parameters. Received: none on {', '.join(silent[:5])}. Write it, or build the model on a real device."
            )
        for module in owners.values():
            module.reset_parameters()
