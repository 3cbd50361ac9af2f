"""NumPy's stream and that of `random` are seeded in each update in which something can draw from them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import danling as dl
from danling.training import keys
from danling.utils.observers import Observer

DRAWN: list[tuple[float, float]] = []


def draw(*_: object, **__: object) -> None:
    DRAWN.append((random.random(), float(numpy.random.rand())))


class Plain(dl.Runner):
    """A program in whose updates nothing but classes of torch and the library runs."""

    def __init__(
        self, config: dict[str, Any], change: Callable[[Any], None] = lambda runner: None
    ) -> None:
        super().__init__(config)
        self.model: Any = nn.Sequential(
            nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(8, 3)
        )
        self.criterion: Any = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": TensorDataset(inputs, torch.arange(24) % 3)}
        change(self)


def drawing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        draw()
        return function(*args, **kwargs)

    return drawn


class Drawing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        draw()
        return super().forward(input)


class Watching(Observer):
    def update_ended(self, outcome: object) -> None:
        draw()


class DrawingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        draw()
        super().step()


def overriding(name: str) -> type[Plain]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        draw()
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind: Any = type("Overriding", (Plain,), {name: method})
    return kind  # type: ignore[no-any-return]


def set_model(runner: Any) -> None:
    runner.model[0] = Drawing(4, 8)
    runner.optimizer = torch.optim.AdamW(runner.model.parameters())
    runner.scheduler = None


def set_optimizer(runner: Any) -> None:
    runner.optimizer, runner.scheduler = DrawingSGD(runner.model.parameters(), lr=0.1), None


def set_activation(runner: Any) -> None:
    runner.model[1].activation = drawing(functional.relu)


def set_scheduler(runner: Any) -> None:
    runner.scheduler = torch.optim.lr_scheduler.LambdaLR(
        runner.optimizer, drawing(lambda step: 1.0)
    )


def set_global_hook(runner: Any) -> None:
    runner._parts.closers.callback(
        torch.nn.modules.module.register_module_forward_hook(draw).remove
    )


def set_method(runner: Any) -> None:
    runner.clip_gradients = drawing(runner.clip_gradients)


def replace(place: Any, name: str) -> Callable[[Any], None]:
    """Return what replaces a method of a class, or a function of a module, until the runner is closed."""

    def change(runner: Any) -> None:
        function = getattr(place, name)
        setattr(place, name, drawing(function))
        runner._parts.closers.callback(setattr, place, name, function)

    return change


def set_event(runner: Any) -> None:
    observer: Any = Observer()
    observer.update_ended = draw
    runner.observers.append(observer)


def replace_step(runner: Any) -> None:
    replace(torch.optim.AdamW, "step")(runner)
    # A schedule has the step of before.
    runner.optimizer, runner.scheduler = torch.optim.AdamW(runner.model.parameters()), None


def enter(context: Callable[[], AbstractContextManager[object]]) -> Callable[[Any], None]:
    return lambda runner: runner._parts.closers.enter_context(context())


def drawn_relu(input: Tensor) -> Tensor:
    draw()
    return functional.relu(input)


@dataclass
class Criterion:
    """Has no hash."""

    reduction: str = "mean"

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        draw()
        return functional.cross_entropy(pred, target)


class DrawingTensor(Tensor):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        draw()
        return super().__torch_function__(function, types, args, kwargs or {})


class DrawingWeight(DrawingTensor, nn.Parameter):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        draw()
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        draw()
        return function(*args, **(kwargs or {}))


def drawn_and_kept(value: Tensor) -> Tensor:
    draw()
    return value


def set_tensor(runner: Any) -> None:
    runner.model[0].weight = DrawingWeight(runner.model[0].weight.detach())
    runner.optimizer, runner.scheduler = (
        torch.optim.AdamW(runner.model.parameters(), foreach=False),
        None,
    )


PLACES: dict[str, Callable[[Any], object]] = {
    "a function as criterion": lambda r: setattr(r, "criterion", drawing(functional.cross_entropy)),
    "a module of the model": set_model,
    "a function within a module": set_activation,
    "a forward of a module": lambda r: setattr(r.model[0], "forward", drawing(r.model[0].forward)),
    "a forward hook": lambda r: r.model[0].register_forward_hook(draw),
    "a forward hook of the criterion": lambda r: r.criterion.register_forward_pre_hook(draw),
    "a backward hook": lambda r: r.model[1].register_full_backward_hook(draw),
    "a hook of a parameter": lambda r: r.model[0].weight.register_hook(draw),
    "a hook behind a parameter": lambda r: r.model[0].weight.register_post_accumulate_grad_hook(
        draw
    ),
    "a hook of all modules": set_global_hook,
    "an optimizer": set_optimizer,
    "a step of an optimizer": lambda r: setattr(r.optimizer, "step", drawing(r.optimizer.step)),
    "a hook of an optimizer": lambda r: r.optimizer.register_step_post_hook(draw),
    "a schedule": set_scheduler,
    "an observer": lambda r: r.observers.append(Watching()),
    "an event in an attribute of an observer": set_event,
    "a method on the runner": set_method,
    "to_device on the runner": lambda r: setattr(r, "to_device", drawing(r.to_device)),
    "an object as criterion": lambda r: setattr(r, "criterion", Criterion()),
    "a function that torch has wrapped": lambda r: setattr(
        r.model[1], "activation", torch.no_grad()(drawn_relu)
    ),
    "a forward of a class": replace(nn.Linear, "forward"),
    "a call of all modules": replace(nn.Module, "__call__"),
    "a step of a class of optimizers": replace_step,
    "a step of a class of schedules": replace(torch.optim.lr_scheduler.LinearLR, "get_lr"),
    "a function of torch": replace(functional, "linear"),
    "a kind of tensors": set_tensor,
    "a mode of functions": enter(FunctionMode),
    "a mode of operations": enter(DispatchMode),
    "hooks of saved tensors": enter(
        lambda: torch.autograd.graph.saved_tensors_hooks(drawn_and_kept, lambda value: value)
    ),
}
METHODS = (
    "train_step",
    "step",
    "backward",
    "compute_loss",
    "batch_weight",
    "to_device",
    "optimizer_step",
    "on_pass_start",
)


def settings(directory: Path, steps: int) -> dict[str, Any]:
    return {
        "dir": directory,
        "seed": 3,
        "steps": steps,
        "log": False,
        "auto_resume": True,
        "checkpoint.interval": 5,
        "dataloader.batch_size": 4,
        "dataloader.num_workers": 0,
    }


def draws(
    kind: type[Plain], change: Callable[[Any], object], directory: Path, *steps: int
) -> list[tuple[float, float]]:
    """Return what is drawn in a run that is resumed after each of these updates but the last."""
    DRAWN.clear()
    for step in steps:
        # What the process draws before is no part of the run.
        random.seed(step), numpy.random.seed(step)
        with kind(settings(directory, step), change) as runner:
            begun = len(DRAWN)
            runner.train()
            assert not runner._parts.keys._only_torch
            assert len(DRAWN) > begun
    return list(DRAWN)


@pytest.mark.parametrize("place", PLACES)
def test_draws_in_an_update_are_the_same_after_a_resume(place: str, tmp_path: Path) -> None:
    whole = draws(Plain, PLACES[place], tmp_path / "whole", 9)
    resumed = draws(Plain, PLACES[place], tmp_path / "resumed", 4, 9)
    # A schedule draws once when it is made.
    assert whole[-4:] == resumed[-4:]
    assert len(set(whole)) == len(whole)


@pytest.mark.parametrize(
    "as_batch",
    [lambda x, y: (x, y), lambda x, y: {"input": x, "target": y}],
    ids=["pair", "mapping"],
)
def test_draws_of_tensors_in_a_batch_are_the_same_after_a_resume(
    as_batch: Any, tmp_path: Path
) -> None:
    def collate(samples: Any) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        return as_batch(inputs.as_subclass(DrawingTensor), targets)

    def change(runner: Any) -> None:
        data = runner.datasets.pop("train")
        runner.dataloaders = {
            "train": torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate)
        }

    def drawn(directory: Path, *steps: int) -> list[tuple[float, float]]:
        DRAWN.clear()
        for step in steps:
            with Plain(settings(directory, step), change) as runner:
                runner.train()
        return list(DRAWN)

    whole = drawn(tmp_path / "whole", 9)
    assert len(whole) > 4
    assert whole[-4:] == drawn(tmp_path / "resumed", 4, 9)[-4:]


@pytest.mark.parametrize("name", METHODS)
def test_draws_in_a_method_are_the_same_after_a_resume(name: str, tmp_path: Path) -> None:
    kind = overriding(name)
    whole, resumed = (
        draws(kind, lambda runner: None, tmp_path / str(steps), *steps)
        for steps in ((13,), (4, 13))
    )
    assert whole[-1:] == resumed[-1:]


def weights_and_streams(
    directory: str, criterion: Any, is_forced: bool
) -> tuple[list[Tensor], bool]:
    """Train in a process into which no other test has imported a library that replaces functions of torch."""
    if is_forced:
        keys.runs_user_code = lambda runner, called: True
    with Plain(
        settings(Path(directory), 9), lambda runner: setattr(runner, "criterion", criterion)
    ) as runner:
        runner.train()
        return [
            p.detach().clone() for p in runner.model.parameters()
        ], runner._parts.keys._only_torch


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), functional.cross_entropy])
def test_only_the_stream_of_torch_is_seeded_if_nothing_else_can_draw(
    criterion: Any, tmp_path: Path
) -> None:
    (found, only_torch), (expected, by_force) = (
        run_processes(
            weights_and_streams, str(tmp_path / str(is_forced)), criterion, is_forced, world_size=1
        )[0]
        for is_forced in (False, True)
    )
    assert only_torch and not by_force
    assert all(map(torch.equal, found, expected))


def draws_by_hand(directory: str) -> tuple[bool, list[Any]]:
    with Plain(settings(Path(directory), 6)) as runner:
        runner.train()
        only_torch = runner._parts.keys._only_torch
        for _ in range(2):
            random.seed(0), numpy.random.seed(0)
            runner.train_step((torch.ones(4, 4), torch.ones(4, dtype=torch.int64)))
            draw()
            runner.step()
    return only_torch, DRAWN[-2:]


def test_a_loop_by_hand_seeds_every_stream(tmp_path: Path) -> None:
    only_torch, (before, after) = run_processes(draws_by_hand, str(tmp_path), world_size=1)[0]
    assert only_torch
    assert before != after
