from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from danling.optim import OPTIMIZERS
from danling.optim.state import load_named_state_dict, named_state_dict


def _train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _optimizer(model: nn.Module, *, turned: bool = False) -> Any:
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": list(model[2].parameters()), "lr": 0.2},
    ]  # type: ignore[index]
    return OPTIMIZERS.build(params=groups[::-1] if turned else groups, type="adamw")


@pytest.mark.parametrize("turned", [False, True])
def test_state_is_matched_by_name_in_any_order_of_groups(turned: bool) -> None:
    model = _model()
    optimizer = _optimizer(model)
    _train(model, optimizer, 3)
    state = named_state_dict(optimizer, model.named_parameters())
    assert state["param_groups"][1]["params"] == ["2.weight", "2.bias"]

    other = _model()
    other.load_state_dict(model.state_dict())
    resumed = _optimizer(other, turned=turned)
    load_named_state_dict(resumed, state, other.named_parameters())
    _train(model, optimizer, 3)
    _train(other, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_the_loaded_state_is_a_copy() -> None:
    model = _model()
    optimizer = _optimizer(model)
    _train(model, optimizer, 1)
    state = named_state_dict(optimizer, model.named_parameters())
    stored = {name: entry["exp_avg"].clone() for name, entry in state["state"].items()}
    other = _model()
    resumed = _optimizer(other)
    load_named_state_dict(resumed, state, other.named_parameters())
    _train(other, resumed, 2)
    assert all(
        torch.equal(state["state"][name]["exp_avg"], value) for name, value in stored.items()
    )


def test_the_state_of_another_model_and_other_groups_are_refused() -> None:
    model = _model()
    state = named_state_dict(_optimizer(model), model.named_parameters())
    other = nn.Sequential(*_model(), nn.Linear(2, 2))
    for net, message in (
        (other, r"without \['3.bias', '3.weight'\]"),
        (model, "1 groups here, 2 stored"),
    ):
        optimizer = OPTIMIZERS.build(params=net.parameters(), type="adamw")
        with pytest.raises(ValueError, match=message):
            load_named_state_dict(optimizer, state, net.named_parameters())
