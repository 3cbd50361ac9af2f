"""What Accelerate makes of model and optimizer, and what a step through it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from danling.accelerate.accelerator import (
    AcceleratePreparation,
    AccelerateReduction,
    open_accelerator,
    release_accelerator,
)
from danling.accelerate.settings import AccelerateSettings
from danling.distributed import LaunchEnvironment, LocalDomain
from danling.training import NonFiniteError

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator() -> Iterator[Any]:
    yield open_accelerator(AccelerateSettings(), LaunchEnvironment(), {})
    release_accelerator()


def reduction(accelerator: Any, model: nn.Module, optimizer: Any, scaler: Any = None) -> AccelerateReduction:
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    preparation.bind(optimizer)
    wrapped = preparation.wrap(model, {})
    return AccelerateReduction(
        optimizer,
        model.named_parameters,
        scaler,
        accelerator=accelerator,
        stepped=preparation.stepped(optimizer),
        model=wrapped,
        domain=LocalDomain(),
        unreduced=list,
    )


def test_until_it_is_bound_the_model_is_as_it_is(accelerator: Any) -> None:
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    model = nn.Linear(2, 2)
    assert preparation.wrap(model, {}) is model
    assert accelerator._models == []
    with pytest.raises(ValueError, match=r"Call super\(\).bind_optimizer\(\) in it"):
        preparation.stepped(torch.optim.SGD(model.parameters(), lr=1.0))
    preparation.bind(None)
    assert preparation.wrap(model, {}) is model
    assert accelerator._models == [model]


def test_the_optimizer_stays_the_users(accelerator: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    group = optimizer.param_groups[0]
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    preparation.bind(optimizer)
    assert preparation.unwrap(preparation.wrap(model, {})) is model is accelerator.unwrap_model(model)
    stepped = preparation.stepped(optimizer)
    assert isinstance(stepped, accelerate.optimizer.AcceleratedOptimizer)
    assert stepped.optimizer is optimizer and optimizer.param_groups[0] is group
    assert preparation.stepped(optimizer) is stepped
    another = torch.optim.SGD(model.parameters(), lr=1.0)
    assert preparation.stepped(another).optimizer is another


def test_a_step_is_made_also_where_accelerate_counts_otherwise(accelerator: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.detach().clone()
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    through.begin(first=True)
    through.backward(model(torch.ones(1, 1)).sum(), last=True)
    accelerator.sync_gradients = False
    through.apply(1)
    assert torch.equal(model.weight, weight - 1.0)
    through.zero()
    assert model.weight.grad is None


def test_a_step_that_accelerate_leaves_out_is_an_error(accelerator: Any) -> None:
    model = nn.Linear(1, 1)
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    through.stepped._is_overflow = True
    with pytest.raises(NonFiniteError, match="update 7, which was found finite"):
        through.apply(7)


def test_one_scaler_the_librarys(accelerator: Any) -> None:
    """A step through the accelerated optimizer is unscaled once, and left out where it is not finite."""
    model = nn.Linear(1, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), scaler)
    for value, moved in ((1.0, 1.0), (float("inf"), 0.0)):
        before = model.weight.detach().clone()
        through.backward(scaler.scale(value * model(torch.ones(1, 1)).sum()), last=True)
        through.unscale(1.0, 1.0)
        through.apply(1)
        scaler.update()
        through.zero()
        assert torch.equal(model.weight, before - moved)
    assert scaler.get_scale() == 4.0
