"""Numbers that torch computes from divided tensors: a DTensor of which each rank has a term, and whose `item()` is that term."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.mesh import Topology
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(16, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
LIMIT = 0.2


class Divided(nn.Module):
    """Leaves its output divided over the ranks of `tensor`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide, self.narrow, self.head = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.narrow(self.wide(inputs).tanh()).tanh())
        return output

    def parallelize(self, topology: Topology) -> None:
        divided = {
            "wide": ColwiseParallel(),
            "narrow": RowwiseParallel(),
            "head": ColwiseParallel(use_local_output=False),
        }
        parallelize_module(self, topology.mesh("tensor"), divided)


def squares(pred: Tensor, target: Tensor) -> Tensor:
    if isinstance(pred, DTensor):
        target = DTensor.from_local(target, pred.device_mesh, [Replicate()], run_check=False)
    return (pred - target).square().mean()


def distance(pred: Tensor, target: Tensor) -> Tensor:
    return (pred - target).abs().mean()


class Fitting(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion, self.metrics = Divided(), squares, {"distance": distance}
        self.datasets = {
            "train": TensorDataset(INPUTS, TARGETS),
            "val": TensorDataset(INPUTS[:6], TARGETS[:6]),
        }


class OwnNorm(Fitting):
    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None], self.config.norm
        )


class Logging(Fitting):
    def train_step(self, data: Any) -> Any:
        returned = super().train_step(data)
        self.log_metric("norm", self.model.head.weight.detach().norm())
        return returned


class Reporting(Fitting):
    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.log_figures({"norm": self.model.head.weight.detach().norm()})


def train(
    kind: type[Fitting], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with kind(config) as runner:
        runner.train()
        weights = {
            name: whole(value.detach()).clone() for name, value in runner.model_state_dict().items()
        }
        return weights, runner.results[1]


def by_hand(norm: float | None = None) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    model = Divided()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, distances = [], []
    for batch in range(0, 16, 4):
        pred, target = model(INPUTS[batch : batch + 4]), TARGETS[batch : batch + 4]
        loss = functional.mse_loss(pred, target)
        losses.append(loss.item())
        distances.append(distance(pred, target).item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT, norm)
        optimizer.step()
    pred = model(INPUTS[:6]).detach()
    of_val = {
        "loss": squares(pred, TARGETS[:6]).item(),
        "distance": distance(pred, TARGETS[:6]).item(),
    }
    return dict(model.state_dict()), {
        "train": {"loss": sum(losses) / 4, "distance": sum(distances) / 4},
        "val": of_val,
    }


def test_a_loss_of_divided_outputs_is_the_whole_one(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        epochs=1,
        dataloader={"batch_size": 4, "shuffle": False},
        stack="parallel",
        parallel={"axes": {"tensor": 2}},
        train_metrics=True,
    )
    weights, figures = by_hand()
    for found, results in run_processes(train, Fitting, config, world_size=2):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
        for split, expected in figures.items():
            assert results[split] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("norm", [2.0, torch.inf])
def test_a_norm_of_torch_over_shards_is_that_of_all_ranks(norm: float, tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        epochs=1,
        dataloader={"batch_size": 2, "shuffle": False},
        stack="parallel",
        parallel={"axes": {"shard": 2}},
        max_grad_norm=LIMIT,
        norm=norm,
    )
    weights, _ = by_hand(norm)
    for found, _ in run_processes(train, OwnNorm, config, world_size=2):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", [Logging, Reporting])
def test_a_part_of_a_number_is_not_logged(kind: type[Fitting], tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=1, stack="parallel", parallel={"axes": {"shard": 2}})
    for outcome in run_outcomes(train, kind, config, world_size=2):
        assert "Expected the whole of metric 'norm'" in str(outcome.error)
        assert "full_tensor()" in str(outcome.error)
