"""Averaged weights beside a loop by hand. No runner takes part."""

from __future__ import annotations

from typing import Literal

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
    train_weights(model)


@torch.no_grad()
def train_weights(model: nn.Module) -> None:
    """Change parameters."""
    for parameter in model.parameters():
        parameter += torch.rand_like(parameter)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize(("warmup", "interval"), [(False, 1), (True, 1), (False, 3), (True, 2)])
def test_averages_are_those_of_a_loop_by_hand(
    warmup: bool, interval: int, buffers: Literal["copy", "average"]
) -> None:
    model = model_of(1)
    ema, expected = (
        EMA(model, decay=0.6, warmup=warmup, interval=interval, buffers=buffers),
        copy_of(model),
    )
    for update in range(1, 14):
        train(model)
        ema.update()
        if update % interval:
            continue
        taken = update // interval
        decay = min(0.6, (1 + taken) / (10 + taken)) if warmup else 0.6
        for name, value in copy_of(model).items():
            copied = not value.is_floating_point() or (buffers == "copy" and "running" in name)
            expected[name] = value if copied else decay * expected[name] + (1 - decay) * value
    assert ema.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(ema.weights[name], value, rtol=1e-12, atol=0.0), name
    assert int(ema.weights["1.num_batches_tracked"]) == 13 - 13 % interval and ema.num_updates == 13


def test_averaged_buffer_has_the_nonfinite_value_of_the_model() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, 2.0]))
    ema = EMA(model, decay=0.5, buffers="average")
    for values in ([2.0, -torch.inf, torch.inf], [2.0, 3.0, 5.0]):
        model.mask.copy_(torch.tensor(values))
        ema.update()
    assert ema.weights["mask"].tolist() == [1.5, 3.0, 5.0]


def test_reassigned_buffer_is_followed_and_comes_back_after_an_evaluation() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(()))
    ema = EMA(model, decay=0.5)
    model.seen = own = model.seen + 7
    ema.update()
    assert ema.weights["seen"] == 7
    with ema.applied():
        model.seen = model.seen + 1
    assert model.seen is own and own == 7 and ema.weights["seen"] == 7
    model.seen = torch.arange(3.0)
    ema.update()
    assert ema.weights["seen"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_in_float32_comes_into_a_narrow_model_and_is_kept(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 4).to(dtype)
    ema = EMA(model, decay=0.999)
    train_weights(model)
    ema.update()
    own, averaged = copy_of(model), {name: value.clone() for name, value in ema.weights.items()}
    with ema.applied():
        assert (
            differences(copy_of(model), {name: value.to(dtype) for name, value in averaged.items()})
            == []
        )
    assert differences(copy_of(model), own) == [] and differences(ema.weights, averaged) == []


def test_averages_of_an_older_checkpoint_are_widened_and_their_buffers_are_those_of_the_model() -> (
    None
):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    older = {name: value + 1 for name, value in copy_of(model).items()}
    ema = EMA(model)
    ema.load_state_dict({"weights": older, "num_updates": 5})
    parameters = dict(model.named_parameters())
    for name, value in ema.weights.items():
        expected = older[name].float() if name in parameters else model.state_dict()[name]
        assert differences(value, expected) == [], name
    again = EMA(model)
    again.load_state_dict(ema.state_dict())
    assert differences(again.state_dict(), ema.state_dict()) == []


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


def test_restored_averages_continue_unchanged() -> None:
    model = model_of(1)
    ema = EMA(model, decay=0.9, warmup=True)
    train(model)
    ema.update()
    state = {
        "weights": {name: value.clone() for name, value in ema.weights.items()},
        "num_updates": ema.num_updates,
    }
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
