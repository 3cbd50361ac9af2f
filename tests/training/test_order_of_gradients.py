"""Three and more ranks add each gradient in one order, in whatever update a process begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import danling as dl


class Words(dl.Runner):
    """A model whose gradients do not come in the order of its parameters."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 11, (36, 5), generator=generator)
        self.datasets = {"train": TensorDataset(tokens, tokens.roll(1, 1) % 4)}
        self.model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 4)).double()
        self.criterion = lambda pred, target: F.cross_entropy(pred.flatten(0, 1), target.flatten())


def _trained(place: str, stack: str, *stops: int) -> list[Tensor]:
    """Train to each of some updates, by another runner each, and return the weights at the end."""
    for steps in stops:
        config = {
            "dir": place,
            "seed": 1,
            "log": False,
            "stack": stack,
            "steps": steps,
            "auto_resume": True,
        }
        with Words(
            {**config, "optim": {"type": "sgd", "lr": 0.5}, "dataloader": {"batch_size": 3}}
        ) as runner:
            runner.train()
            weights = [
                parameter.detach().clone() for parameter in runner.unwrapped_model.parameters()
            ]
    return weights


@pytest.mark.parametrize("stack", ["ddp", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_resumed_run_of_three_ranks_is_bitwise_the_same(tmp_path: Path, stack: str) -> None:
    whole = run_processes(_trained, str(tmp_path / "whole"), stack, 4, world_size=3)
    parts = run_processes(_trained, str(tmp_path / "parts"), stack, 1, 2, 3, 4, world_size=3)
    for expected, found in zip(whole, parts):
        assert all(torch.equal(*tensors) for tensors in zip(expected, found))


class Watched(Words):
    """A program whose main process alone looks at gradients, and whose weights have some before they are wrapped."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.seen: list[float] = []
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(self.rank))
        if self.rank == 0 and self.config.hooked == "parameter":
            self.model[1].weight.register_hook(
                lambda gradient: self.seen.append(float(gradient.abs().sum()))
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap_model(model)
        if self.config.hooked == "communication":
            assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
            wrapped.register_comm_hook(None, lambda state, bucket: self._communicate(state, bucket))
        return wrapped

    def _communicate(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.seen.append(float(bucket.buffer().abs().sum()))
        return allreduce_hook(None, bucket)


def _watched(place: str, hooked: str) -> tuple[list[float], list[float]]:
    config = {
        "dir": place,
        "seed": 1,
        "log": False,
        "steps": 2,
        "hooked": hooked,
        "optim": {"type": "sgd", "lr": 0.5},
    }
    with Watched({**config, "dataloader": {"batch_size": 3}}) as runner:
        held = [
            float(parameter.grad.mean())
            for parameter in runner.unwrapped_model.parameters()
            if parameter.grad is not None
        ]
        runner.train()
        return held, runner.seen


@pytest.mark.parametrize("hooked", ["no", "parameter", "communication"])
def test_hooks_see_gradients_of_updates_alone(tmp_path: Path, hooked: str) -> None:
    for rank, (held, seen) in enumerate(
        run_processes(_watched, str(tmp_path), hooked, world_size=3)
    ):
        assert held == [float(rank)] * 5
        assert bool(seen) == (
            hooked == "communication" or (hooked == "parameter" and rank == 0)
        ) and all(seen)
