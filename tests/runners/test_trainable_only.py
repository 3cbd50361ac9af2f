"""Checkpoints of what is trained alone, of weights that two processes divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Headed(dl.Runner):
    """Trains the second of two layers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.model[0].requires_grad_(False)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": TensorDataset(torch.randn(32, 8), torch.randn(32, 4))}


def weights_after(root: str, steps: int, *, alone: bool, begun: int, moved: bool = False) -> dict[str, Tensor]:
    config: dict[str, Any] = {"steps": steps, "seed": 0, "dir": root, "log": False, "auto_resume": True}
    config |= {"stack": "parallel", "parallel": {"axes": {"shard": 2}}, "checkpoint": {"trainable_only": alone}}
    with Headed({**config, "optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 4}}) as runner:
        assert runner.train_state.global_step == begun
        if moved:
            with torch.no_grad():
                runner.unwrapped_model[0].bias.add_(1.0)
        runner.train()
        with runner.whole_weights():
            return {name: tensor.detach().clone() for name, tensor in runner.unwrapped_model.state_dict().items()}


@pytest.mark.slow
def test_a_frozen_weight_that_was_changed_by_hand_stays_when_a_run_goes_over_and_back(tmp_path: Path) -> None:
    (whole, _) = run_processes(
        weights_after, str(tmp_path / "whole"), 6, alone=False, begun=0, moved=True, world_size=2
    )
    root = str(tmp_path / "parts")
    run_processes(weights_after, root, 2, alone=False, begun=0, moved=True, world_size=2)
    for steps, alone in ((3, True), (4, True), (6, False)):
        begun = steps - 1 if steps < 6 else 4
        (parts, _) = run_processes(weights_after, root, steps, alone=alone, begun=begun, world_size=2)
        assert torch.equal(parts["0.bias"], whole["0.bias"])
    assert all(torch.equal(value, whole[name]) for name, value in parts.items())
