"""Which modules FSDP2 gathers one by one where nothing is configured: those with a forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import danling as dl
from danling.mesh.fsdp import find_blocks, sharded_modules
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).reshape(8, 4)
TARGETS = INPUTS.sin().roll(1, 0)
RATE, UPDATES = 0.1, 3


class Columns(nn.Module):
    """Lists of layers in a list, and layers whose weights are computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.columns = nn.ModuleList(
            [
                nn.ModuleList([nn.Linear(4, 4), spectral_norm(nn.Linear(4, 4))]),
                nn.ModuleDict({"left": weight_norm(nn.Linear(4, 4)), "right": nn.Linear(4, 4)}),
            ]
        )
        self.head = spectral_norm(nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in (*self.columns[0], *self.columns[1].values()):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Shared(nn.Module):
    """Layers that several lists, several blocks or several places of one list share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        once, twice, inner = (nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList([once, nn.Sequential(inner, nn.Tanh()), twice, twice])
        self.down = nn.ModuleList([once, nn.Sequential(inner, nn.GELU()), nn.Linear(4, 4)])
        self.first = self.up[0]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.first(inputs)
        for layer in (*self.up, *self.down):
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


MODELS = {"columns": Columns, "shared": Shared}


class ColumnsRunner(dl.Runner):
    def __init__(self, config: Mapping[str, Any], model: str) -> None:
        super().__init__(config)
        self.model = MODELS[model]().double()
        self.criterion = nn.MSELoss()
        self.datasets = {"train": torch.utils.data.TensorDataset(INPUTS, TARGETS)}


def train(config: Mapping[str, Any], model: str) -> tuple[dict[str, Tensor], int]:
    with ColumnsRunner(config, model) as runner:
        runner.train()
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        return weights, len(sharded_modules(runner.model))


def by_hand(kind: str) -> dict[str, Tensor]:
    model = MODELS[kind]().double()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        optimizer.step()
    return model.state_dict()


def test_blocks_are_layers_of_inner_lists_without_their_parametrizations() -> None:
    names = [
        f"columns.{column}.{layer}"
        for column, layers in ((0, "01"), (1, ("left", "right")))
        for layer in layers
    ]
    assert [*find_blocks(Columns())] == names


def test_shared_layer_is_one_block() -> None:
    assert [*find_blocks(Shared())] == ["up.0", "up.1", "up.2", "down.1", "down.2"]


@pytest.mark.parametrize(("model", "expected_units"), [("columns", 5), ("shared", 4)])
def test_blocks_train_in_shards_as_in_one_process(
    model: str, expected_units: int, tmp_path: Path
) -> None:
    config = settings(
        tmp_path,
        optim={"type": "sgd", "lr": RATE},
        epochs=UPDATES,
        dataloader={"batch_size": 4},
        stack="parallel",
        parallel={"axes": {"shard": 2}},
    )
    expected = by_hand(model)
    for weights, units in run_processes(train, config, model, world_size=2):
        assert units == expected_units and weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
