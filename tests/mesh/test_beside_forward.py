"""Losses that are computed from the parameters themselves, and not in the forward of a module: FSDP2 does not sum their gradient."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64).reshape(5, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
SHARE = 0.05


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.begin, self.end = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.begin(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output: Tensor = self.end(hidden)
        return output


def penalty(model: nn.Module, *, is_summed: bool) -> Tensor:
    terms = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            placements = [Partial()] * parameter.device_mesh.ndim if is_summed else None
            terms.append(parameter.full_tensor(grad_placements=placements).square().sum())
        else:
            terms.append(parameter.square().sum())
    return SHARE * torch.stack(terms).sum()


class Penalized(dl.Runner):
    is_summed = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = Blocks(), nn.MSELoss()
        self.datasets = {"train": TensorDataset(INPUTS, TARGETS)}

    def train_step(self, data: Any) -> Any:
        pred = self.model(data[0])
        loss = self.compute_loss(pred, data[1]) + penalty(
            self.unwrapped_model, is_summed=self.is_summed
        )
        self.backward(loss)
        return pred, loss


class Plain(Penalized):
    is_summed = False


class Unpenalized(Penalized):
    def train_step(self, data: Any) -> Any:
        pred = self.model(data[0])
        loss = self.compute_loss(pred, data[1])
        self.backward(loss)
        return pred, loss


def train(kind: type[Penalized], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("danling").addHandler(handler)
    with contextlib.closing(handler), kind(config) as runner:
        runner.train()
        weights = {
            name: whole(value.detach()).clone() for name, value in runner.model_state_dict().items()
        }
    return weights, said.getvalue()


def by_hand(share: float) -> dict[str, Tensor]:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(torch.split(INPUTS, 4), torch.split(TARGETS, 4)):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        for parameter in model.parameters():
            loss = loss + share * parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(model.state_dict())


def of_shards(tmp_path: Path, axes: dict[str, int], **more: Any) -> dict[str, Any]:
    data = {"batch_size": 4 // (2 if len(axes) == 1 else 4), "shuffle": False, "drop_last": False}
    return settings(
        tmp_path, epochs=1, dataloader=data, stack="parallel", parallel={"axes": axes}, **more
    )


@pytest.mark.parametrize(
    "axes",
    [{"shard": 2}, pytest.param({"replicate": 2, "shard": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_form_that_the_warning_names_is_right(axes: dict[str, int], tmp_path: Path) -> None:
    """The last update has one sample: ranks have other weights."""
    for found, said in run_processes(
        train, Penalized, of_shards(tmp_path, axes), world_size=2 ** len(axes)
    ):
        torch.testing.assert_close(found, by_hand(SHARE), rtol=0, atol=1e-12)
        assert said.count("A loss is computed from a parameter that the axis shard divides") == 1


def test_a_gradient_that_is_not_summed_is_named_once(tmp_path: Path) -> None:
    for found, said in run_processes(train, Plain, of_shards(tmp_path, {"shard": 2}), world_size=2):
        assert (found["blocks.0.0.weight"] - by_hand(SHARE)["blocks.0.0.weight"]).abs().max() > 1e-4
        assert said.count("grad_placements=[Partial()]") == 1


def test_a_loss_within_the_forward_is_not_named(tmp_path: Path) -> None:
    for found, said in run_processes(
        train, Unpenalized, of_shards(tmp_path, {"shard": 2}), world_size=2
    ):
        torch.testing.assert_close(found, by_hand(0.0), rtol=0, atol=1e-12)
        assert "outside of the forward" not in said


def test_a_canonical_sum_refuses_it(tmp_path: Path) -> None:
    config = of_shards(tmp_path, {"shard": 2}, gradient_sum="canonical")
    config["dataloader"] = {"global_batch_size": 4, "micro_batch_size": 1, "shuffle": False}
    with pytest.raises(ValueError, match="Compute it in the forward of the module"):
        run_processes(train, Penalized, config, world_size=2)
