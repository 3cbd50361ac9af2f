"""Averaged weights beside a loop by hand. No runner takes part."""

from __future__ import annotations

import pytest
import torch
from support.toys import differences
from torch import Tensor, nn

from danling.checkpoints import CheckpointMismatch
from danling.training import EMA


def model_of(seed: int) -> nn.Module:
    """Return a model with floating and integer buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change parameters and buffers."""
    model.train()
    model(torch.rand(5, 3, dtype=torch.float64))
    for parameter in model.parameters():
        parameter += torch.rand_like(parameter)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("warmup", "interval"), [(False, 1), (True, 1), (False, 3), (True, 2)])
def test_averages_are_those_of_a_loop_by_hand(warmup: bool, interval: int) -> None:
    model = model_of(1)
    ema, expected = EMA(model, decay=0.6, warmup=warmup, interval=interval), copy_of(model)
    for update in range(1, 14):
        train(model)
        ema.update()
        if update % interval:
            continue
        taken = update // interval
        decay = min(0.6, (1 + taken) / (10 + taken)) if warmup else 0.6
        for name, value in copy_of(model).items():
            floating = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if floating else value
    assert ema.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(ema.weights[name], value, rtol=1e-12, atol=0.0), name
    assert int(ema.weights["1.num_batches_tracked"]) == 13 - 13 % interval and ema.num_updates == 13


def test_the_model_has_its_averages_inside_and_its_own_weights_afterwards_bit_for_bit() -> None:
    model = model_of(1)
    ema = EMA(model, decay=0.5)
    train(model)
    ema.update()
    own, averaged = copy_of(model), {name: value.clone() for name, value in ema.weights.items()}
    assert differences(own, averaged)
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        assert differences(copy_of(model), averaged) == []
        raise RuntimeError("inside")
    assert differences(copy_of(model), own) == [] and differences(ema.weights, averaged) == []


def test_what_was_saved_goes_on_as_if_nothing_had_been() -> None:
    model = model_of(1)
    ema = EMA(model, decay=0.9, warmup=True)
    train(model)
    ema.update()
    state = {"weights": {name: value.clone() for name, value in ema.weights.items()}, "num_updates": ema.num_updates}
    other = EMA(model, decay=0.9, warmup=True)
    other.load_state_dict(state)
    train(model)
    ema.update()
    other.update()
    assert differences(other.state_dict(), ema.state_dict()) == []
    ema.reset()
    assert differences(ema.weights, copy_of(model)) == [] and ema.num_updates == 0


def test_averages_of_another_model_are_refused() -> None:
    ema = EMA(model_of(1), decay=0.9)
    weights = {name: value for name, value in ema.weights.items() if name != "0.bias"}
    with pytest.raises(CheckpointMismatch, match=r"missing=\['0.bias'\], unexpected=\['head'\]"):
        ema.load_state_dict({"weights": {**weights, "head": torch.ones(1)}, "num_updates": 1})
