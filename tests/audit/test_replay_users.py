"""Runners as users write them raise no alarm and end as without checks: what their steps write to is put back first."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.flips import Flipped, settings
from torch import Tensor, nn

from danling.training import UpdateOutcome


class Adversarial(Flipped):
    """Steps a second optimizer in `train_step`, as often as a counter says, and draws from a generator of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Train the critic, then the model."""
        noise = torch.randn(data["input"].shape, generator=self.generator)
        pred = self.model(data["input"] + 0.01 * noise)
        self.calls += 1
        for _ in range(1 + self.calls % 2):
            self.critic_optimizer.zero_grad()
            torch.autograd.backward(self.critic(pred.detach()).mean() ** 2)
            self.critic_optimizer.step()
        loss = self.criterion(pred, data["target"]) - 0.1 * self.critic(pred).mean()
        self.backward(loss)
        return pred, loss


class Taught(Flipped):
    """A teacher that is averaged in `optimizer_step`, a tensor and a list as attributes, and a batch that is written to."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.teacher = copy.deepcopy(self.model)
        self.center = torch.zeros(3)
        self.recent: list[Tensor] = []

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Learn from the teacher."""
        data["input"].mul_(2).add_(1)
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * self.teacher(data["input"]).mean(0)
        self.recent.append(data["input"].mean())
        pred = self.model(data["input"])
        loss = self.criterion(pred - self.center, data["target"])
        loss = loss + (pred.mean() - torch.stack(self.recent[-5:]).mean()) ** 2
        self.backward(loss)
        return pred, loss

    def optimizer_step(self) -> None:
        """Step, and average."""
        super().optimizer_step()
        with torch.no_grad():
            for mean, live in zip(self.teacher.parameters(), self.model.parameters()):
                mean.lerp_(live, 0.1)


class Clamped(Flipped):
    """Adds noise to gradients before the step, and clamps weights after it."""

    def step(self) -> UpdateOutcome:
        """Step, between noise and bounds."""
        for parameter in self.model.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter))
        outcome = super().step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.3, 0.3)
        return outcome


def end_of(kind: type[Flipped], root: Path, **more: Any) -> dict[str, Tensor]:
    """Train and return all that a user has put on the runner."""
    with kind(settings(root, steps=8, **more)) as runner:
        runner.train()
        modules = {name: value for name, value in vars(runner).items() if isinstance(value, nn.Module)}
        found = {f"{name}.{key}": v.clone() for name, m in modules.items() for key, v in m.state_dict().items()}
        counted = {
            "calls": torch.tensor(getattr(runner, "calls", 0)),
            "recent": torch.tensor(getattr(runner, "recent", [])),
        }
        return {**found, **counted, "stream": torch.default_generator.get_state()}


@pytest.mark.parametrize("kind", [Adversarial, Taught, Clamped])
def test_what_steps_of_users_write_to_is_put_back(kind: type[Flipped], tmp_path: Path) -> None:
    clean = end_of(kind, tmp_path / "clean", **{"audit.replay_interval": None})
    checked = end_of(kind, tmp_path / "checked")
    assert clean.keys() == checked.keys() and all(torch.equal(clean[name], checked[name]) for name in clean)
