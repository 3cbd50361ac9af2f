"""An update on shards that an exception has left half-way: FSDP2 keeps sums and gathered parameters, which are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 128, dtype=torch.float64).reshape(32, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
UPDATES = 4


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Failing(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), nn.MSELoss()
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.left = [self.config.fails]

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        self.fail("before backward")
        return super().compute_loss(pred, target)

    def train_step(self, data: Any) -> Any:
        returned = super().train_step(data)
        self.fail("after backward")
        return returned

    def fail(self, where: str) -> None:
        micro_batch = {"after backward": 2, "before backward": 3}[where]
        if self.left == [where] and self.train_state.micro_step == micro_batch:
            self.left.clear()
            raise RuntimeError("a bad sample")


def train(config: Mapping[str, Any]) -> dict[str, Tensor]:
    with Failing(config) as runner:
        with pytest.raises(RuntimeError, match="a bad sample"):
            runner.train()
        runner.train()
        return {name: whole(value.detach()).clone() for name, value in runner.model_state_dict().items()}


@pytest.mark.parametrize("fails", ["after backward", "before backward"])
@pytest.mark.parametrize(("replicas", "sync"), [(1, "last"), (2, "last_all_reduce")])
def test_an_update_on_shards_that_was_left_is_made_again(replicas: int, sync: str, fails: str, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(UPDATES):
        batch = slice(8 * update, 8 * update + 8)
        optimizer.zero_grad()
        functional.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    config = settings(
        tmp_path,
        steps=UPDATES,
        accum_steps=2,
        dataloader={"batch_size": 2 // replicas, "shuffle": False},
        stack="parallel",
        parallel={"axes": {"shard": 2, "replicate": replicas}},
        fsdp={"gradient_sync": sync},
        fails=fails,
    )
    for found in run_processes(train, config, world_size=2 * replicas, timeout=60):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-12)
