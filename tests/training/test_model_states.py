"""The states of a model, its averages and its optimizer, without a runner."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.toys import differences
from torch import nn

from danling.checkpoints import CheckpointMismatch, import_weights
from danling.training import EMA
from danling.training.model_states import ModelStates


class Trained:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.unwrapped_model: nn.Module = self.model
        self.ema: EMA | None = EMA(self.model, decay=0.5)
        self.optimizer = None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


def test_mismatched_names_and_shapes_are_named() -> None:
    states = ModelStates(Trained(1))
    weights = states.model_state()
    with pytest.raises(CheckpointMismatch, match=r"missing=\['0\.bias'\], unexpected=\['head'\]"):
        states.load_model({**{n: v for n, v in weights.items() if n != "0.bias"}, "head": torch.ones(1)})
    with pytest.raises(CheckpointMismatch, match=r"shapes. Received: .* To keep those of the new model, add 'model"):
        states.load_model({**weights, "0.bias": torch.ones(9)})
    states.load_model({"0.bias": torch.full((4,), 7.0)}, partial=True)
    assert states.model_state()["0.bias"].tolist() == [7.0] * 4


def test_model_with_module_as_its_only_part_takes_its_plain_weights(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.module = Trained(seed).model

    trained, saved = Trained(1), Wrapper(2).state_dict()
    trained.unwrapped_model = model = Wrapper(3)
    states = ModelStates(trained)
    for weights in (saved, {f"module.{name}": value for name, value in saved.items()}):
        torch.save(weights, tmp_path / "weights.pth")
        model.module[0].weight.data.zero_()
        states.load_model(import_weights(tmp_path / "weights.pth"))
        assert differences(states.model_state(), dict(saved)) == []
    states.load_model(saved)
    with pytest.raises(CheckpointMismatch, match=r"unexpected=\['module.head'\]"):
        states.load_model({"head": torch.ones(1)}, partial=True)


def test_averages_of_left_out_weights_begin_at_the_models() -> None:
    trained = Trained(1)
    states = ModelStates(trained)
    states.load_ema({"weights": {"0.bias": torch.zeros(4)}, "num_updates": 9}, partial=True)
    averages = states.averages()
    assert averages.num_updates == 9 and averages.weights["0.bias"].tolist() == [0.0] * 4
    assert torch.equal(averages.weights["2.weight"], trained.model[2].weight)
    trained.ema = None
    with pytest.raises(CheckpointMismatch, match="ema.enabled=False"):
        states.load_ema({"weights": {}, "num_updates": 0})
