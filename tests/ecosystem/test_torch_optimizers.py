"""Optimizers in parts: torch's Muon for matrices with AdamW for the rest, and one that estimates a curvature now and then, as Sophia does.

Library: torch
Works: `Muon` with `AdamW` by `dl.optim.JointOptimizer`, and optimizers with a further method that an `optimizer_step` calls
Exact: updates as in a loop by hand; resume
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import in_parts
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Sophia(torch.optim.Optimizer):
    """A step clipped by an estimate of the curvature (https://arxiv.org/abs/2305.14342), as its authors write it: without a closure."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        rho: float = 0.04,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho})

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        if not self.state[parameter]:
            self.state[parameter].update(
                exp_avg=torch.zeros_like(parameter), hessian=torch.zeros_like(parameter)
            )
        return self.state[parameter]

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self._state(parameter)["hessian"]
                held.mul_(group["betas"][1]).addcmul_(
                    parameter.grad, parameter.grad, value=1 - group["betas"][1]
                )

    @torch.no_grad()
    def step(self, closure: None = None, bs: int = 4) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self._state(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
                ratio = (
                    state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)
                ).clamp(None, 1)
                parameter.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return dl.optim.JointOptimizer(
        torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon": muon,
    "sophia": lambda model: Sophia(model.parameters()),
}


def points() -> TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Parts(dl.Runner):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model, self.criterion = model_of(), nn.MSELoss()
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.datasets = {"train": points()}

    def optimizer_step(self) -> None:
        if isinstance(self.optimizer, Sophia) and self.train_state.global_step % 3 == 0:
            self.optimizer.update_hessian()
        super().optimizer_step()


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_updates_are_those_of_a_loop_by_hand_and_of_a_resumed_run(
    kind: str, tmp_path: Path
) -> None:
    model, (inputs, targets) = model_of(), points().tensors
    optimizer = OPTIMIZERS[kind](model)
    schedule = dl.SCHEDULERS.build(optimizer, type="linear", total_steps=9)
    for step in range(9):
        part = slice(step % 6 * 4, step % 6 * 4 + 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind == "sophia" and step % 3 == 0:
            optimizer.update_hessian()
        optimizer.step()
        schedule.step()
    config = {"optim": {}, "scheduler": {"type": "linear", "total_steps": 9}, "max_grad_norm": 1.0}
    loader = {"batch_size": 4, "shuffle": False}
    whole, runner = in_parts(
        partial(Parts, kind=kind), tmp_path, (4, 9), **config, dataloader=loader
    )
    for mine, expected in zip(whole.unwrapped_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    assert all(
        map(torch.equal, runner.unwrapped_model.parameters(), whole.unwrapped_model.parameters())
    )
