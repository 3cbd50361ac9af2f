"""What components change in training and no checkpoint contains is named at a save: compared with what a resume gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl

STEPS = 9


class Annealed(nn.Linear):
    """Its temperature is a number."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        nn.init.ones_(self.weight)
        self.temperature = 1.0
        self._calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self._calls += 1
        return super().forward(input) / self.temperature


class Declared(Annealed):
    def get_extra_state(self) -> dict[str, float]:
        return {"temperature": self.temperature}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.temperature = state["temperature"]


class Balanced(nn.Module):
    """A criterion that begins with the scale of its first loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.0

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(pred, target)
        self.scale = self.scale or loss.item()
        return loss / self.scale


class Made(Annealed):
    """Numbers that training makes, and that a resumed run does not make again."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: float | None = None
        self.weighted = numpy.float32(0)
        self.warm: int | None = 3

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.count = 0
        self.count += 1
        self.factor = 1.0 if self.factor is None else self.factor * 0.99
        self.weighted += numpy.float32(0.01)
        if self.count > 1:
            self.warm = None
        own = self.count * self.factor + float(self.weighted) + (self.warm or 0)
        return super().forward(input) / own


class Contained(Annealed):
    """Keeps numbers in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.window: deque[float] = deque(maxlen=3)
        self.history: list[float] = []
        self.counts = {"calls": 0}
        self.shift = numpy.zeros(1)

    def forward(self, input: Tensor) -> Tensor:
        self.window.append(input.mean().item())
        self.history.append(self.window[-1])
        self.counts["calls"] += 1
        self.shift += 0.01
        own = sum(self.window) + sum(self.history) + self.counts["calls"] + float(self.shift[0])
        return super().forward(input) / own


class Cached(Annealed):
    """Its containers come again by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.scales: dict[str, float] = {}
        self.features: list[Any] = []

    def forward(self, input: Tensor) -> Tensor:
        self.sizes = [*input.shape, int(input.sum() * 7) % 5]
        self.scales["width"] = 2**0.5
        self.features = [input.detach()]
        return super().forward(input) / self.scales["width"]


class Averaged(Annealed):
    """Keeps averages in tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(2)
        self.square = torch.ones((), dtype=torch.bfloat16)
        self.calls = torch.zeros(1, dtype=torch.long)

    def forward(self, input: Tensor) -> Tensor:
        self.mean.lerp_(input.mean(0), 0.1)
        self.square = 0.9 * self.square + input.square().mean().bfloat16()
        self.calls += 1
        return super().forward(input - self.mean) / self.square / self.calls


class Looked(Annealed):
    """Keeps what each forward makes in tensors, for others to look at, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = torch.zeros(())
        self.features = torch.zeros(0)
        self.table = torch.zeros(2)

    def forward(self, input: Tensor) -> Tensor:
        self.table.copy_(torch.arange(2.0))
        self.features = input.detach()
        self.penalty = self.weight.square().sum()
        return super().forward(input + self.table) + self.penalty


class Viewed(Annealed):
    """Keeps constants in views that torch reads in other ways than its memory has them, and one that changes."""

    def __init__(self) -> None:
        super().__init__()
        turned = torch.polar(torch.ones(3), torch.arange(3.0)).conj()
        self.turned, self.negated = turned, turned.imag
        self.column = torch.arange(6.0).reshape(3, 2)[:, 1]
        self.repeated = torch.ones(1).expand(3)
        self.none = torch.zeros(0)
        self.moving = torch.ones(3, 2)[:, 1]

    def forward(self, input: Tensor) -> Tensor:
        self.moving += self.column - self.negated + self.turned.real * self.repeated
        return super().forward(input) / self.moving.sum()


class Plain:
    """A criterion that is no module."""

    scale: float | None = None

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(pred, target)
        self.scale = loss.item() if self.scale is None else 0.9 * self.scale
        return loss / self.scale


class Normed(Annealed):
    """Begins with the scale of its first batch, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = input.norm().item() + 0.1
        return super().forward(input) / self.scale


class Sized(Annealed):
    """Keeps sizes of its input, and what follows from them: all come again by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.height: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.height, self.width = input.shape
        self.longest = int(input.sum() * 7) % 5
        self.factor = self.width**0.5
        self.form = f"{self.width} wide"
        self.began = True
        found: Tensor = super().forward(input) / self.factor
        return found


class Sam(torch.optim.Optimizer):
    """Steps another optimizer, as published implementations of SAM do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.base.step()


class Returned(Sam):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.base.load_state_dict(state.pop("base"))
        self.steps = state.pop("steps")
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


class Moments(torch.optim.Optimizer):
    """Keeps its moments by itself: in a list, in a dictionary that begins empty, and one as an attribute."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.parameters = [each for group in self.param_groups for each in group["params"]]
        self.first = [torch.zeros_like(each) for each in self.parameters]
        self.second: dict[Tensor, Tensor] = {}
        self.fastest = torch.zeros(10_000)
        self.table: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.table["dynamic"] = torch.ones(2)
        for each, first in zip(self.parameters, self.first):
            first.mul_(0.9).add_(each.grad)
            before = self.second.get(each, torch.ones_like(each))
            self.second[each] = 0.9 * before + each.grad.square()
            self.fastest.mul_(0.9).add_(first.abs().max())
            each.sub_(0.02 * first / self.second[each].sqrt() / (1 + self.fastest[-1]))


class Late(torch.optim.Optimizer):
    """Makes its moments at its first step, and notes the norms of its gradients."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.first: list[Tensor] | None = None
        self.norms: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"]]
        if self.first is None:
            self.first = [torch.zeros_like(each) for each in parameters]
            self.second = tuple(torch.ones_like(each) for each in parameters)
            self.flat = torch.zeros(sum(each.numel() for each in parameters))
        self.norms = [each.grad.norm() for each in parameters]
        self.flat = 0.9 * self.flat + torch.cat([each.grad.flatten() for each in parameters])
        for each, first, second in zip(parameters, self.first, self.second):
            first.mul_(0.9).add_(each.grad)
            second.mul_(0.9).add_(each.grad.square())
            each.sub_(0.02 * first / second.sqrt() / (1 + self.flat.norm()))


class InState(torch.optim.SGD):
    """Has a list of what is in its state, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.buffers: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.buffers = [each["momentum_buffer"] for each in self.state.values()]


class Begins(torch.optim.SGD):
    """Notes that it has begun, as optimizers of bitsandbytes do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initialized = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.initialized = True
        super().step()


class Run(dl.Runner):
    def __init__(
        self,
        config: Mapping[str, Any],
        model: Callable[[], nn.Module],
        criterion: Any,
        optimizer: Any,
        where: str,
    ) -> None:
        super().__init__(config)
        points = torch.arange(16.0).reshape(8, 2) / 16
        self.datasets = {"train": TensorDataset(points, points.sum(1, keepdim=True) + 3)}
        self.model, self.criterion = model(), criterion()
        self.optimizer = optimizer(self.model.parameters(), lr=0.02, momentum=0.9)
        self.where = where

    def cool(self, where: str) -> None:
        if self.where == where:
            model: Any = self.unwrapped_model
            model.temperature *= 0.9

    def on_pass_start(self, split: str) -> None:
        self.cool("on_pass_start")

    def train_step(self, data: Any) -> Any:
        self.cool("train_step")
        return super().train_step(data)


CASES: dict[str, tuple[Any, Any, Any, str, tuple[str, ...]]] = {
    "number of a model": (
        Annealed,
        nn.MSELoss,
        torch.optim.SGD,
        "train_step",
        ("model.temperature",),
    ),
    "number of a criterion": (Annealed, Balanced, torch.optim.SGD, "", ("criterion.scale",)),
    "inner optimizer": (Annealed, nn.MSELoss, Sam, "", ("optimizer.steps", "optimizer.base (SGD)")),
    "made in training": (
        Made,
        nn.MSELoss,
        torch.optim.SGD,
        "",
        ("model.count", "model.factor", "model.weighted", "model.warm"),
    ),
    "containers": (
        Contained,
        nn.MSELoss,
        torch.optim.SGD,
        "",
        ("model.window", "model.history", "model.counts", "model.shift"),
    ),
    "caches": (Cached, nn.MSELoss, torch.optim.SGD, "", ()),
    "tensors": (
        Averaged,
        nn.MSELoss,
        torch.optim.SGD,
        "",
        ("model.mean", "model.square", "model.calls"),
    ),
    "tensors in views": (Viewed, nn.MSELoss, torch.optim.SGD, "", ("model.moving",)),
    "tensors of a forward": (Looked, nn.MSELoss, torch.optim.SGD, "", ()),
    "criterion without a module": (Annealed, Plain, torch.optim.SGD, "", ("criterion.scale",)),
    "made once": (Normed, nn.MSELoss, torch.optim.SGD, "", ("model.scale=",)),
    "sizes": (Sized, nn.MSELoss, torch.optim.SGD, "", ()),
    "extra state": (Declared, nn.MSELoss, torch.optim.SGD, "train_step", ()),
    "state_dict of the optimizer": (Annealed, nn.MSELoss, Returned, "", ()),
    "tensors of the optimizer": (
        Annealed,
        nn.MSELoss,
        Moments,
        "",
        ("optimizer.first", "optimizer.second", "optimizer.fastest"),
    ),
    "tensors that the optimizer makes": (
        Annealed,
        nn.MSELoss,
        Late,
        "",
        ("optimizer.first", "optimizer.second", "optimizer.flat"),
    ),
    "list of the state of the optimizer": (Annealed, nn.MSELoss, InState, "", ()),
    "flag of the optimizer": (Annealed, nn.MSELoss, Begins, "", ()),
    "on_pass_start": (Annealed, nn.MSELoss, torch.optim.SGD, "on_pass_start", ()),
    "nothing": (Annealed, nn.MSELoss, torch.optim.SGD, "", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resume_gives_the_same_or_what_it_lacks_was_named(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *made, names = CASES[case]
    model, criterion, optimizer, where = made
    config = {
        "dataloader": {"batch_size": 2, "shuffle": False},
        "steps": 2 * STEPS,
        "auto_resume": True,
    }

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return found

    def train(directory: str, steps: int) -> Tensor:
        with Run(
            settings(tmp_path / directory, **{**config, "steps": steps}),
            model,
            criterion,
            optimizer,
            where,
        ) as run:
            run.train()
            model_of_run: Any = run.unwrapped_model
            weight: Tensor = model_of_run.weight.detach().clone()
            return weight

    whole = train("whole", 2 * STEPS)
    lines = said()
    train("parts", STEPS)
    lines_of_first = said()
    assert torch.equal(train("parts", 2 * STEPS), whole) == (not names)
    if case == "made once":
        # Nothing tells it from a constant but a resume.
        assert not lines and not lines_of_first
        lines = said()
    assert sum(sum(f" {name}" in line for line in lines) for name in names) == len(names)
    assert not any("optimizer.norms" in line for line in lines)
    if not names:
        assert not lines + lines_of_first + said()


def test_optimizer_that_accelerate_wraps_is_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("accelerate")
    config = settings(tmp_path, dataloader={"batch_size": 2}, steps=STEPS, stack="accelerate")
    with Run(config, Annealed, nn.MSELoss, Moments, "") as run:
        run.train()
    assert (
        "Training has changed optimizer.first, optimizer.second, optimizer.fastest" in caplog.text
    )


def test_an_inner_optimizer_that_loses_the_groups_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (STEPS, 2 * STEPS):
        config = settings(tmp_path, dataloader={"batch_size": 2}, steps=steps, auto_resume=True)
        with Run(config, Annealed, nn.MSELoss, Sam, "") as run:
            run.train()
    # The rates of a schedule do not reach it.
    run.optimizer.param_groups[0]["lr"] = 0.0
    assert run.optimizer.base.param_groups[0]["lr"] == 0.02
    assert caplog.text.count("optimizer.base had the parameter groups") == 1


def test_nothing_is_named_where_nothing_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(
        tmp_path, dataloader={"batch_size": 2}, steps=STEPS, checkpoint={"load_only": True}
    )
    with Run(config, Annealed, nn.MSELoss, Sam, "train_step") as run:
        run.train()
        assert run.optimizer.steps == STEPS
    assert "no checkpoint contains" not in caplog.text
