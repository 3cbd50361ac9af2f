"""Runners as users write them raise no alarm and end as without checks: what their steps write to is put back first."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.flips import Flipped, FlippedPoints, settings
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


class Shadow:
    """Averaged weights in a class of the user's own, with a generator and a counter."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.generator = torch.Generator().manual_seed(5)
        self.calls, self.history = 0, {"calls": [0]}
        self.counts = numpy.zeros(3)

    def update(self, model: nn.Module) -> None:
        """Take weights in."""
        self.calls += 1
        self.history["calls"].append(self.calls)
        self.counts += numpy.arange(3)
        for name, weight in model.named_parameters():
            self.weights[name].lerp_(weight.detach(), float(torch.rand((), generator=self.generator)))


class Helped(Flipped):
    """An object that averages, a memory that grows, attributes that come to be, and names for the same tensor."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.shadow = Shadow(self.model)
        self.memory = torch.zeros(0, 3)
        self.center = self.best = torch.zeros(3)

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Depend on all of them."""
        pred = self.model(data["input"])
        self.memory = torch.cat([self.memory, pred.detach()])
        self.center = 0.9 * self.center + 0.1 * pred.detach().mean(0)
        if not hasattr(self, "mean"):
            self.mean = pred.detach().mean(0)
        if self.state.train.global_step == 4:
            self.snapshot, self.box = self.center.clone(), [self.center]
            self.best = self.center
        bias = self.best + self.memory.mean(0) + self.mean + self.shadow.calls % 3
        loss = self.criterion(pred + bias, data["target"])
        self.backward(loss)
        return pred, loss

    def optimizer_step(self) -> None:
        """Step, and average."""
        super().optimizer_step()
        self.shadow.update(self.model)


class Cached(nn.Module):
    """A table of sparse gradients, statistics that are no buffer, and one that is made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, sparse=True)
        self.linear = nn.Linear(6, 3)
        self.running, self.places = torch.zeros(3), {"cache": {}}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of `x`, of shape `(batch, 6)`."""
        found = self.linear(x + self.table((x[:, 0].abs() * 3).long().clamp(max=7)))
        self.running = 0.9 * self.running + 0.1 * found.detach().mean(0)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(3))
        self.late = self.late * 0.99
        if len(x) not in self.places["cache"]:
            self.places["cache"][len(x)] = torch.zeros(3)
        return found + self.running + self.late + self.places["cache"][len(x)].add_(0.01)


class Scheduled(Flipped):
    """A critic whose gradient adds up, its optimizer and schedule in lists, and a temperature that a schedule sets."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({**config, "max_grad_norm": None})
        self.model = Cached()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.critic = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(self.critic.parameters(), lr=torch.tensor(0.01))
        self.others = [{"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}]
        self.temperature = torch.ones(1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        """Set the temperature beside the rate."""
        self.temperature.mul_(0.95)
        return 0.9**step

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Leave a gradient at the critic."""
        pred = self.model(data["input"])
        torch.autograd.backward(self.critic(pred.detach()).mean() ** 2)
        loss = self.criterion(pred / self.temperature, data["target"])
        self.backward(loss)
        return pred, loss

    def optimizer_step(self) -> None:
        """Step both, and the schedule of the critic."""
        super().optimizer_step()
        for other in self.others:
            other["optimizer"].step()
            other["optimizer"].zero_grad()
            other["schedule"].step()


def facts_of(runner: Any) -> dict[str, Tensor]:
    """Return what these classes hold besides modules."""
    found = {"calls": getattr(runner, "calls", 0), "recent": getattr(runner, "recent", [])}
    shadow, others = getattr(runner, "shadow", None), getattr(runner, "others", [])
    if shadow is not None:
        weights = {f"shadow.{name}": weight for name, weight in shadow.weights.items()}
        names = ("memory", "center", "best", "mean", "snapshot")
        held = {name: getattr(runner, name) for name in names}
        found |= {**weights, **held, "counts": shadow.counts, "shadow": shadow.history["calls"]}
    if others:
        found |= {"epoch": others[0]["schedule"].last_epoch, "rate": others[0]["optimizer"].param_groups[0]["lr"]}
        found |= {"running": runner.model.running, "temperature": runner.temperature}
        found |= {str(key): value for key, value in runner.model.places["cache"].items()}
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def end_of(kind: type[Flipped], root: Path, **more: Any) -> dict[str, Tensor]:
    """Train and return all that a user has put on the runner."""
    with kind(settings(root, steps=8, **more)) as runner:
        runner.train()
        modules = {name: value for name, value in vars(runner).items() if isinstance(value, nn.Module)}
        found = {f"{name}.{key}": v.clone() for name, m in modules.items() for key, v in m.state_dict().items()}
        return {**found, **facts_of(runner), "stream": torch.default_generator.get_state()}


@pytest.mark.parametrize("kind", [Adversarial, Taught, Clamped, Helped, Scheduled])
def test_what_steps_of_users_write_to_is_put_back(kind: type[Flipped], tmp_path: Path) -> None:
    clean = end_of(kind, tmp_path / "clean", **{"audit.replay_interval": None})
    checked = end_of(kind, tmp_path / "checked")
    assert clean.keys() == checked.keys() and all(torch.equal(clean[name], checked[name]) for name in clean)


class Writing(FlippedPoints):
    """A data set that counts what it reads on the runner."""

    runner: Any = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.runner.read.add_(1)
        return super().__getitem__(index)


class Read(Flipped):
    """A runner that its data set writes to."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        data = Writing(64)
        self.datasets, data.runner, self.read = {"train": data}, self, torch.zeros(1)


def test_a_data_set_that_writes_to_the_runner_is_refused_with_the_attribute(tmp_path: Path) -> None:
    said = "Received: 'read' of the runner, which has changed while a batch was read"
    with Read(settings(tmp_path)) as runner, pytest.raises(ValueError, match=said):
        runner.train()
