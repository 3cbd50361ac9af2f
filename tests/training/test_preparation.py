"""How a model is wrapped and what is known of it, in one process and over two."""

from __future__ import annotations

import os

import pytest
import torch
from support.processes import run_processes
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import Domain, LaunchEnvironment, init_process_group
from danling.training.preparation import ModelPreparation


def check_two_ranks() -> int:
    """One of two ranks; returns which."""
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    init_process_group(LaunchEnvironment.read(), device)
    world = Domain(device=device)
    preparation = ModelPreparation(world)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    assert preparation.wrap(frozen, {}) is frozen
    with pytest.raises(ValueError, match="wrap the model for the gradients"):
        preparation.check_reduced(frozen, trains=True, reduced_by_user=False)
    preparation.check_reduced(frozen, trains=True, reduced_by_user=True)

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="static_graph=True"):
        preparation.wrap(model, {"static_graph": True}, reduces_later=True)
    later = preparation.wrap(model, {}, reduces_later=True)
    assert preparation.broadcasts_buffers and isinstance(later, DistributedDataParallel)
    assert not later.broadcast_buffers
    wrapped = preparation.wrap(model, {})
    assert isinstance(wrapped, DistributedDataParallel) and wrapped.broadcast_buffers
    assert preparation.unwrap(wrapped) is model
    assert preparation.forward_communicates(model) is None
    assert preparation.forward_communicates(nn.SyncBatchNorm(2)) == "SyncBatchNorm"
    preparation.note_wrapped(model)
    assert not preparation.trainables_changed(model)
    model[0].requires_grad_(False)
    assert preparation.trainables_changed(model)

    # Buffers and weights that ranks have written differently become those of the first one.
    mean, extra = model[1].running_mean, torch.full((1,), float(rank))
    assert isinstance(mean, torch.Tensor)
    mean.fill_(rank + 1.0)
    preparation.broadcast_buffers(model, [extra])
    assert mean[0] == rank + 1
    preparation.broadcast_buffers(wrapped, [extra])
    assert mean[0] == 1 and extra[0] == 0
    with preparation.whole_weights(model, modify=True):
        model[0].weight.data.fill_(rank + 5.0)
    assert torch.all(model[0].weight == 5.0)
    del later, wrapped
    dist.destroy_process_group()
    return rank


def test_two_ranks() -> None:
    assert run_processes(check_two_ranks, world_size=2) == [0, 1]
