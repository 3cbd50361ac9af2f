"""Models that ranks have built with values of their own: that of the first rank is divided, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(16, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)


def make(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double()
    model[0].register_buffer("drawn", torch.randn(3))
    for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn):
        model[0].register_buffer(
            f"drawn_{dtype}".replace(".", "_"), torch.randint(0, 9, (3,)).to(dtype)
        )
    return model


class ByRank(dl.Runner):
    """Seeds by rank before it builds the model, or loads weights on the first rank only."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(self.rank), nn.MSELoss()
        for parameter in self.model.parameters():
            parameter.of_user = True
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}


class OtherWidth(ByRank):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = make(0, width=8 + self.rank)


class OnMeta(ByRank):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if self.rank:
            self.model = self.model.to("meta")


def train(kind: type[ByRank], config: Mapping[str, Any]) -> dict[str, Tensor]:
    with kind(config) as runner:
        runner.train()
        return {
            name: whole(value.detach()).double()
            for name, value in runner.model_state_dict().items()
        }


@pytest.mark.parametrize(
    ("axes", "size"),
    [
        ({"shard": 2}, 4),
        ({"pipeline": 2}, 8),
        pytest.param({"pipeline": 2, "shard": 2}, 4, marks=pytest.mark.slow),
        ({"replicate": 2, "shard": 2}, 2),
    ],
)
def test_the_model_of_the_first_rank_is_divided(
    axes: dict[str, int], size: int, tmp_path: Path
) -> None:
    model = make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(0, 16, 8):
        optimizer.zero_grad()
        functional.mse_loss(model(INPUTS[batch : batch + 8]), TARGETS[batch : batch + 8]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    config = settings(
        tmp_path,
        epochs=1,
        dataloader={"batch_size": size, "shuffle": False},
        stack="parallel",
        parallel={
            "axes": axes,
            "module_fqns_per_model_part": [["0", "1"], ["2"]] if "pipeline" in axes else None,
        },
    )
    world_size = 4 if len(axes) == 2 else 2
    found: dict[str, Tensor] = {}
    for of_rank in run_processes(train, ByRank, config, world_size=world_size):
        torch.testing.assert_close(
            of_rank,
            {name: model.state_dict()[name].double() for name in of_rank},
            rtol=0,
            atol=1e-12,
        )
        found |= of_rank
    assert found.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "text"), [(OtherWidth, "(9, 4)"), (OnMeta, "on the meta device on number 1")]
)
def test_models_of_other_tensors_are_refused(kind: type[ByRank], text: str, tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=1, stack="parallel", parallel={"axes": {"shard": 2}})
    for outcome in run_outcomes(train, kind, config, world_size=2):
        assert "Expected one model on all ranks" in str(outcome.error)
        assert text in str(outcome.error)
