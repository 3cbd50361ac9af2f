"""Buffers that training reads are those of the first rank in every update, on a mesh as under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Centered(nn.Module):
    """Subtracts a running mean, in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean


class Stopping(dl.Runner):
    """Stops in an update, if asked to."""

    def __init__(self, config: Any, stop_at: int | None = None) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        draws = torch.randn(16, 10, generator=generator, dtype=torch.float64)
        self.datasets = {"train": TensorDataset(draws[:, :6], draws[:, 6:])}
        self.model = nn.Sequential(nn.Linear(6, 6), Centered(), nn.Linear(6, 4)).double()
        self.criterion = nn.MSELoss()
        self.stop_at = stop_at

    def train_step(self, data: Any) -> Any:
        if self.train_state.global_step == self.stop_at:
            self.stop()
        return super().train_step(data)


def _trained(place: str, more: dict[str, Any], *stops: int | None) -> tuple[int, dict[str, Tensor]]:
    for stop_at in stops:
        config = {"dir": place, "seed": 1, "log": False, "epochs": 1, "auto_resume": True, **more}
        with Stopping(
            {**config, "optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 2}},
            stop_at,
        ) as runner:
            runner.train()
            with runner.whole_weights():
                weights = {
                    name: each.detach().clone()
                    for name, each in runner.unwrapped_model.named_parameters()
                }
            steps = runner.train_state.global_step
    return steps, weights


@pytest.mark.parametrize("axis", ["shard", pytest.param("replicate", marks=pytest.mark.slow)])
def test_ranks_of_a_mesh_read_the_buffers_of_the_first_rank_in_every_update(
    tmp_path: Path, axis: str
) -> None:
    mesh = {"stack": "parallel", "parallel": {"axes": {axis: 2}}}
    expected = run_processes(_trained, str(tmp_path / "ddp"), {"stack": "ddp"}, None)[0]
    whole = run_processes(_trained, str(tmp_path / "whole"), mesh, None)[0]
    parts = run_processes(_trained, str(tmp_path / "parts"), mesh, 1, None)[0]
    assert expected[0] == whole[0] == parts[0] == 4
    for name, weight in expected[1].items():
        torch.testing.assert_close(whole[1][name], weight, rtol=0, atol=1e-12)
        assert torch.equal(parts[1][name], whole[1][name]), name
