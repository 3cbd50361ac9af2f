"""Frozen weights are left out of checkpoints, and known again by their bits and the places of these."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.training.model_states import FrozenWeights, bit_sum


class Headed(dl.Runner):
    def __init__(self, config: dict[str, Any], base: float = 1.0) -> None:
        super().__init__(config)
        self.model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        nn.init.constant_(self.model[0].requires_grad_(False).weight, base)
        nn.init.zeros_(self.model[0].bias)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": TensorDataset(torch.randn(8, 2), torch.randn(8, 2))}


def settings(root: Path, *, alone: bool, **more: Any) -> dict[str, Any]:
    common = {
        "seed": 0,
        "dir": str(root),
        "log": False,
        "optim": {"type": "sgd", "lr": 0.1},
        "ema.enabled": True,
    }
    return {
        **common,
        "checkpoint": {"trainable_only": alone, "async_enabled": False},
        "auto_resume": True,
        **more,
    }


def test_run_switches_to_saving_trained_weights_alone_and_back(tmp_path: Path) -> None:
    whole = ["0.bias", "0.weight", "1.bias", "1.weight"]
    for steps, alone in enumerate((False, True, True, False), 2):
        with Headed(settings(tmp_path, alone=alone, steps=steps)) as runner:
            runner.train()
            stored = runner.read_checkpoint("latest")
            assert (
                sorted(stored["model"])
                == sorted(stored["ema"]["weights"])
                == (whole[2:] if alone else whole)
            )
            assert ("frozen" in stored) == alone and runner.unwrapped_model[
                0
            ].weight.unique().tolist() == [1.0]
    with Headed(settings(tmp_path, alone=True, steps=6)) as runner:
        runner.train()
    with pytest.raises(CheckpointMismatch, match="frozen weights that the checkpoint was made on"):
        Headed(settings(tmp_path, alone=True, steps=7), base=1.5)


def test_frozen_weight_different_from_a_whole_checkpoint_is_still_saved(tmp_path: Path) -> None:
    with Headed(settings(tmp_path, alone=False, steps=1), base=1.5) as runner:
        runner.train()
    with Headed(settings(tmp_path, alone=True, steps=2)) as runner:
        runner.train()
        assert sorted(runner.read_checkpoint("latest")["model"]) == [
            "0.weight",
            "1.bias",
            "1.weight",
        ]


@pytest.mark.parametrize("weights", [{}, {"1.weight": torch.zeros(5, 2), "1.bias": torch.zeros(5)}])
def test_run_that_left_out_a_layer_of_its_base_resumes(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The base lacks the layer, or has it in another shape; another seed makes other frozen weights than the run began from."""
    torch.save(
        {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), **weights}, tmp_path / "base.pth"
    )
    config = settings(tmp_path / "run", alone=True, pretrained=str(tmp_path / "base.pth"))
    config["checkpoint"]["exclude_from_loading"] = ["model.1"]
    with Headed({**config, "steps": 2}, base=2.0) as runner:
        runner.train()
        trained = {
            name: value.clone() for name, value in runner.unwrapped_model.state_dict().items()
        }
    with Headed({**config, "steps": 2}, base=3.0) as runner:
        found = runner.unwrapped_model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in trained.items())
        assert runner.train_state.global_step == 2


@pytest.mark.parametrize("permutation", ["two rows", "two values", "two pairs of values"])
def test_exchanged_values_within_a_frozen_weight_are_named(permutation: str) -> None:
    weight = nn.Parameter(
        torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), requires_grad=False
    )
    model: Any = SimpleNamespace(named_parameters=lambda: [("weight", weight)])
    frozen = FrozenWeights(SimpleNamespace(unwrapped_model=model))  # type: ignore[arg-type]
    flat = weight.data.view(-1)
    flat[:4] = torch.tensor([1.0, 2.0, 2.0, 1.0])
    assert frozen.identity() == frozen.identity()
    # The second pair moves the other way round: factors on a line would not see it.
    places = {"two values": [1, 0, 2, 3], "two pairs of values": [1, 0, 3, 2]}
    if permutation in places:
        flat[:4] = flat[:4][places[permutation]]
    else:
        weight.data = weight.data[[1, 0, *range(2, 8)]]
    with pytest.raises(ValueError, match="Received: other values of weight"):
        frozen.identity()


@pytest.mark.parametrize(
    ("dtype", "integers"),
    [
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
        (torch.bool, torch.uint8),
    ],
)
def test_sum_is_the_bits_times_an_odd_number_of_their_place(
    dtype: torch.dtype, integers: torch.dtype
) -> None:
    tensor = (torch.randn(40, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    ones = torch.eye(40, dtype=torch.int64)
    factors = [bit_sum(one) for one in ones]
    assert len(set(factors)) == 40 and all(factor % 2 for factor in factors)
    total = sum(
        value * factor
        for value, factor in zip(tensor.view(integers).tolist(), factors, strict=True)
    )
    assert (bit_sum(tensor) - total) % 2**64 == 0
    assert bit_sum(torch.empty(0)) == 0


def test_exchanged_pieces_of_a_large_weight_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.training.model_states._PIECE", 4)
    first, second, rest = torch.arange(4.0), torch.arange(4.0, 8), torch.ones(3)
    orders = ([first, second, rest], [second, first, rest], [first, rest, second])
    assert len({bit_sum(torch.cat(parts)) for parts in orders}) == 3
