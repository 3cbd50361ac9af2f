"""Programs that change what an update is computed from in hooks of their own."""

from __future__ import annotations

from typing import Any

import torch

from danling.training.attributes import REMEMBERED_BYTES
from danling.utils.observers import Observer

from . import training


class Levelled(training.Noisy):
    """Rows with a level that the program changes and the dataset saves."""

    level = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.level = state["level"]

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        return {**found, "input": found["input"] + self.level}


class Earlier(training.Net):
    """Changes an attribute, the optimizer's settings and its dataset in each update before the sums."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.temperature = 1.0
        self.levelled = Levelled(41, 7)
        self.datasets["train"] = self.levelled

    def train_step(self, data: Any) -> Any:
        return super().train_step({**data, "input": data["input"] / self.temperature})

    def step(self) -> Any:
        self.temperature *= 0.97
        self.levelled.level += 0.01
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 1.1 * group["weight_decay"]
        return super().step()


class WeightsEarlier(training.Net):
    """Changes weights before the sums."""

    def step(self) -> Any:
        with torch.no_grad():
            for parameter in self.unwrapped_model.parameters():
                parameter.mul_(0.99)
        return super().step()


class LargeEarlier(training.Net):
    """Changes an attribute before the sums that is too large to be put back."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.bank = torch.zeros(REMEMBERED_BYTES // 4 + 1)

    def step(self) -> Any:
        self.bank[0] += 1
        return super().step()


class SavesInStep(training.Net):
    """Saves twice in `step`, first under a history name, and counts after it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps_made = 0

    def step(self) -> Any:
        found = super().step()
        if self.state.train.global_step % 4 == 3:
            self.save_checkpoint(history=True)
            self.save_checkpoint()
        self.steps_made += 1
        return found


class EvaluatesInStep(training.Net):
    """Evaluates in `step`, after the update."""

    def step(self) -> Any:
        found = super().step()
        if self.state.train.global_step == 6:
            self.evaluate("val")
        return found


class SavesAndEvaluatesInStep(training.Net):
    """Saves and then evaluates in `step`, after the update."""

    def step(self) -> Any:
        found = super().step()
        if self.state.train.global_step == 6:
            self.save_checkpoint()
            self.evaluate("val")
        return found


class MomentumEncoder(training.Net):
    """Moves weights through `.data` in each forward, as an encoder with momentum does."""

    def train_step(self, data: Any) -> Any:
        weight, bias = [*self.unwrapped_model.parameters()][:2]
        bias.data = 0.9 * bias.data + 0.1 * weight.data.mean(1)
        return super().train_step(data)


class Careful(training.Net):
    """Writes weights and puts them back, within the update: averages of its own, and those of an evaluation."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        layers = [*self.model.children()]
        torch.nn.utils.parametrizations.weight_norm(layers[0])
        tied = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        tied[1].weight = tied[0].weight
        self.model = torch.nn.Sequential(*layers, *tied)
        with torch.inference_mode():
            self.features = torch.ones(REMEMBERED_BYTES // 4 + 1)
        self.averages = torch.optim.swa_utils.AveragedModel(self.model)

    def train_step(self, data: Any) -> Any:
        if self.state.train.global_step % 5 == 4:
            self.evaluate("val")
        own = {name: value.clone() for name, value in self.unwrapped_model.state_dict().items()}
        self.unwrapped_model.load_state_dict(self.averages.module.state_dict())
        with torch.no_grad():
            soft = self.unwrapped_model(data["input"]).softmax(1)
        self.unwrapped_model.load_state_dict(own)
        return super().train_step({**data, "input": data["input"] + soft.mean()})

    def clip_gradients(self, grad_norm: torch.Tensor) -> None:
        torch._foreach_mul_([each.grad for each in self.parameters if each.grad is not None], 0.5)
        super().clip_gradients(grad_norm)

    def step(self) -> Any:
        found = super().step()
        self.averages.update_parameters(self.unwrapped_model)
        return found


class Evaluating(Observer):
    """Evaluates after an update."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def update_ended(self, outcome: Any) -> None:
        if self.runner.state.train.global_step == 6:
            self.runner.evaluate("val")


class Counting(Observer):
    """Counts updates."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def update_ended(self, outcome: Any) -> None:
        self.runner.heard += 1


class ObserverEvaluates(training.Net):
    """Has an observer that evaluates, and one after it that counts."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.heard = 0
        self.observers.extend([Evaluating(self), Counting(self)])


class EvaluatesAtPassStart(training.Net):
    """Evaluates where some passes begin, and keeps the loss."""

    saved = ("passes", "losses")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.losses: list[float] = []

    def on_pass_start(self, split: str) -> None:
        super().on_pass_start(split)
        if self.passes % 4 == 2:
            self.losses.append(self.evaluate("val")["val"]["loss"])


class Averages(training.Net):
    """Has a mean of its own."""

    def train_step(self, data: Any) -> Any:
        self.log_metric("size", data["input"].abs().mean())
        return super().train_step(data)


class ReadsRemotely(training.Net):
    """Fails in its seventh update with an error that reads as one of a lost rank."""

    is_mended = False
    """Of the process: attributes of the runner are put back with the update."""

    def train_step(self, data: Any) -> Any:
        if self.state.train.global_step == 6 and self.fails():
            raise RuntimeError("503: Connection reset by peer")
        return super().train_step(data)

    def fails(self) -> bool:
        return True


class ReadsRemotelyAgain(ReadsRemotely):
    """Fails so on one rank, once."""

    def fails(self) -> bool:
        was_mended, ReadsRemotely.is_mended = ReadsRemotely.is_mended, True
        return self.rank == 1 and not was_mended


_ALL = (
    Earlier,
    WeightsEarlier,
    LargeEarlier,
    SavesInStep,
    EvaluatesInStep,
    SavesAndEvaluatesInStep,
    MomentumEncoder,
    Careful,
    ObserverEvaluates,
    EvaluatesAtPassStart,
    Averages,
    ReadsRemotely,
    ReadsRemotelyAgain,
)
KINDS = {each.__name__: each for each in _ALL}


def rank() -> None:
    """Be one rank of a program, and note the error with which it ends."""
    training.KINDS.update(KINDS)
    training.noted_error()
