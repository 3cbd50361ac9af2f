"""An actor and a critic (TD3, https://arxiv.org/abs/1802.09477) on recorded transitions, with two optimizers that are stepped in turns.

python examples/actor_critic.py                                    # 20 s of processor time
python examples/actor_critic.py --auto_resume true --steps 3000    # goes on from there

The critics are updated in each step, the actor in each second one, against the new critics. The target networks follow both after an
update of the actor. They are an attribute of the runner, so checkpoints have them. The task is to push a point to the origin.
It prints the mean cost of a step of the trained actor, and of no action at all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


def moved(state: Tensor, action: Tensor) -> Tensor:
    """Return position and speed (N, 2) a tenth of a second later; actions (N, 1) are accelerations."""
    position, speed = state[:, :1], state[:, 1:]
    speed = speed + 0.1 * action
    return torch.cat([position + 0.1 * speed, speed], dim=1)


def cost(state: Tensor, action: Tensor) -> Tensor:
    """Return what a step costs (N, 1): the distance from the origin, the speed and the effort, squared."""
    return state.square().sum(dim=1, keepdim=True) + 0.1 * action.square()


class ActorCritic(nn.Module):
    """A policy, and two critics of a state and an action."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1), nn.Tanh())
        self.critics = nn.ModuleList(
            nn.Sequential(
                nn.Linear(3, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, 1),
            )
            for _ in range(2)
        )

    def values(self, state: Tensor, action: Tensor) -> list[Tensor]:
        """Return what both critics expect (N, 1) of states (N, 2) and actions (N, 1)."""
        return [critic(torch.cat([state, action], dim=1)) for critic in self.critics]


class TD3(dl.Runner):
    """Trains on transitions that were recorded with random actions."""

    saved = ("target",)

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        state, action = 2 * torch.rand(4096, 2) - 1, 2 * torch.rand(4096, 1) - 1
        self.datasets = {
            "train": TensorDataset(state, action, -cost(state, action), moved(state, action))
        }
        self.model = ActorCritic()
        self.target = copy.deepcopy(self.model)
        self.optimizer = {
            "critics": torch.optim.Adam(self.model.critics.parameters(), lr=1e-3),
            "actor": torch.optim.Adam(self.model.actor.parameters(), lr=1e-3),
        }

    def train_step(self, data: Any) -> tuple[None, None]:
        """Update the critics, and the actor in each second step."""
        state, action, reward, following = data
        model: Any = self.model
        with self.optimizing("critics"):
            with torch.no_grad():
                noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
                planned = (self.target.actor(following) + noise).clamp(-1, 1)
                wanted = reward + 0.97 * torch.minimum(*self.target.values(following, planned))
            first, second = model.values(state, action)
            self.backward(
                nn.functional.mse_loss(first, wanted) + nn.functional.mse_loss(second, wanted)
            )
        with self.optimizing("actor", every=2) as due:
            if due:
                self.backward(-model.values(state, model.actor(state))[0].mean())
        if due:
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.unwrapped_model.parameters()):
                    old.lerp_(new, 0.01)
        return None, None

    @torch.no_grad()
    def mean_cost(self, actor: Any, steps: int = 100) -> float:
        """Return the mean cost of a step, from 64 states on."""
        state, total = torch.linspace(-1, 1, 128).view(64, 2), 0.0
        for _ in range(steps):
            action = actor(state)
            total += float(cost(state, action).mean())
            state = moved(state, action)
        return total / steps


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="actor_critic", steps=2000, checkpoint={"interval": 500}
    )
    config.dataloader.batch_size = 128
    config.parse()
    with TD3(config) as runner:
        runner.train()
        trained, idle = (
            runner.mean_cost(runner.unwrapped_model.actor),
            runner.mean_cost(lambda state: 0 * state[:, :1]),
        )
        runner.print(f"cost of a step: {trained:.3f} by the actor, {idle:.3f} without any action")
