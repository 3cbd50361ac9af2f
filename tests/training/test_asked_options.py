"""Options of optimizers and schedules at a resume: what the checkpoint replaces is named, what training changes is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.toys import Small, settings
from torch import Tensor
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from danling.checkpoints import CheckpointMismatch

Make = Callable[..., Any]


class Run(Small):
    """Its optimizer and schedule are made by functions; a hook may change or replace the schedule."""

    def __init__(
        self, config: Mapping[str, Any], optimizer: Make, schedule: Make | None, hook: Make | None
    ) -> None:
        super().__init__(config)
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = schedule and schedule(self.optimizer)
        self.hook = hook

    def on_pass_start(self, split: str) -> None:
        if self.hook is not None:
            self.hook(self)


def sgd(parameters: Any, **options: Any) -> Any:
    return SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def train(
    place: Path,
    steps: int,
    schedule: Make | None,
    optimizer: Make = sgd,
    hook: Make | None = None,
    **more: Any,
) -> Run:
    """Train to a step, two updates a pass, from where the directory is."""
    config = settings(place, steps=steps, auto_resume=True, optim={}, **more)
    with Run(config, optimizer, schedule, hook) as run:
        run.train()
    return run


def weight(run: Run) -> Tensor:
    model: Any = run.unwrapped_model
    found: Tensor = model.weight.detach().clone()
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def of_parts(optimizer: Any, gamma: float = 0.9, milestone: int = 2) -> Any:
    parts = [
        schedules.ConstantLR(optimizer, 0.5, 3),
        schedules.ExponentialLR(optimizer, gamma),
    ]
    return schedules.SequentialLR(optimizer, parts, [milestone])


def chained(optimizer: Any, gamma: float = 0.9) -> Any:
    parts = [
        schedules.ConstantLR(optimizer, 0.5, 3),
        schedules.ExponentialLR(optimizer, gamma),
    ]
    return schedules.ChainedScheduler(parts)


class Halving(LRScheduler):
    """A user's schedule, which changes the argument that it was made with."""

    def __init__(self, optimizer: Any, factor: float = 1.0) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.factor *= 0.9
        return [base * self.factor for base in self.base_lrs]


class Power:
    """A function of a schedule with a number of its own, which torch saves."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: int) -> float:
        return self.base**step


PAIRS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "StepLR": (schedules.StepLR, {"step_size": 2}, {"step_size": 3}, "step_size=2 (here 3)"),
    "StepLR.gamma": (schedules.StepLR, {"step_size": 2}, {"step_size": 2, "gamma": 0.5}, "gamma="),
    "MultiStepLR": (schedules.MultiStepLR, {"milestones": [2]}, {"milestones": [3]}, "milestones="),
    "ConstantLR": (schedules.ConstantLR, {}, {"factor": 0.5}, "factor="),
    "LinearLR": (schedules.LinearLR, {}, {"end_factor": 0.5}, "end_factor=1.0 (here 0.5)"),
    "ExponentialLR": (schedules.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}, "gamma="),
    "PolynomialLR": (schedules.PolynomialLR, {}, {"power": 2.0}, "power=1.0 (here 2.0)"),
    "CosineAnnealingLR": (schedules.CosineAnnealingLR, {"T_max": 9}, {"T_max": 8}, "T_max=9"),
    "WarmRestarts": (
        schedules.CosineAnnealingWarmRestarts,
        {"T_0": 3},
        {"T_0": 3, "T_mult": 2},
        "T_mult=1 (here 2)",
    ),
    "CyclicLR.max_lr": (
        schedules.CyclicLR,
        {"base_lr": 0.01, "max_lr": 0.1},
        {"base_lr": 0.01, "max_lr": 0.2},
        "max_lrs=[0.1] (here [0.2])",
    ),
    "CyclicLR.mode": (
        schedules.CyclicLR,
        {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
        {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "mode": "triangular2"},
        "mode='triangular' (here 'triangular2')",
    ),
    "CyclicLR.base_momentum": (
        schedules.CyclicLR,
        {"base_lr": 0.01, "max_lr": 0.1},
        {"base_lr": 0.01, "max_lr": 0.1, "base_momentum": 0.7},
        "base_momentums=[0.8] (here [0.7])",
    ),
    "OneCycleLR.pct_start": (
        schedules.OneCycleLR,
        {"max_lr": 0.1, "total_steps": 19},
        {"max_lr": 0.1, "total_steps": 19, "pct_start": 0.5},
        "schedule_phases=",
    ),
    "OneCycleLR.anneal_strategy": (
        schedules.OneCycleLR,
        {"max_lr": 0.1, "total_steps": 19},
        {"max_lr": 0.1, "total_steps": 19, "anneal_strategy": "linear"},
        "anneal_func_type='cos' (here 'linear')",
    ),
    "OneCycleLR.max_lr": (
        schedules.OneCycleLR,
        {"max_lr": 0.1, "total_steps": 19},
        {"max_lr": 0.2, "total_steps": 19},
        "max_lr=0.1 (here 0.2)",
    ),
    "ReduceLROnPlateau": (
        schedules.ReduceLROnPlateau,
        {"patience": 1},
        {"patience": 2},
        "patience=1 (here 2)",
    ),
    "SWALR": (SWALR, {"swa_lr": 0.01}, {"swa_lr": 0.02}, "swa_lr=0.01 (here 0.02)"),
    "LambdaLR": (
        lambda optimizer, base: schedules.LambdaLR(optimizer, Power(base)),
        {"base": 0.9},
        {"base": 0.8},
        "lr_lambdas=",
    ),
    "MultiplicativeLR": (
        lambda optimizer, base: schedules.MultiplicativeLR(optimizer, Power(base)),
        {"base": 0.9},
        {"base": 0.8},
        "lr_lambdas=",
    ),
    "SequentialLR": (of_parts, {}, {"milestone": 3}, "milestones=[2] (here [3])"),
    "SequentialLR.part": (of_parts, {}, {"gamma": 0.8}, "gamma=0.9 (here 0.8)"),
    "ChainedScheduler": (chained, {}, {"gamma": 0.8}, "gamma=0.9 (here 0.8)"),
    "of the user": (Halving, {"factor": 1.0}, {"factor": 0.8}, "factor="),
}


def test_every_schedule_of_torch_is_tested() -> None:
    kinds = [kind for kind in vars(schedules).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, LRScheduler)} - {"LRScheduler"}
    tested = {name.partition(".")[0] for name in PAIRS}
    assert names - {"CosineAnnealingWarmRestarts", "_LRScheduler"} <= tested


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_options_that_the_checkpoint_replaces_are_named_and_others_are_not(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, before, after, message = PAIRS[name]
    more: dict[str, Any] = (
        {"scheduler": {"monitor": "train.loss"}} if name == "ReduceLROnPlateau" else {}
    )

    def make(options: dict[str, Any]) -> Make:
        return lambda optimizer: kind(optimizer, **options)

    whole = train(tmp_path / "whole", 6, make(before), **more)
    train(tmp_path / "parts", 3, make(before), **more)
    same = train(tmp_path / "parts", 6, make(before), **more)
    assert torch.equal(weight(same), weight(whole))
    assert not said(caplog)
    train(tmp_path / "parts", 8, make(after), **more)
    warnings = said(caplog)
    assert sum(message in line for line in warnings) == 1, warnings
    # The checkpoint's are used and named for as long as the program has others.
    train(tmp_path / "parts", 9, make(after), **more)
    assert sum(message in line for line in said(caplog)) == 1
    train(tmp_path / "parts", 10, make(before), **more)
    assert not said(caplog)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.2}, "lr=0.1 (here 0.2)"),
        ({"nesterov": True}, "nesterov=False (here True)"),
        ({"weight_decay": 0.1}, "weight_decay=0 (here 0.1)"),
        ({"foreach": False}, ""),
    ],
)
@pytest.mark.parametrize("schedule", [None, lambda o: schedules.StepLR(o, 2)])
def test_options_of_the_optimizer_are_named_with_a_schedule_too(
    options: dict[str, Any],
    message: str,
    schedule: Make | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(tmp_path, 3, schedule)
    said(caplog)
    run = train(tmp_path, 4, schedule, lambda parameters: sgd(parameters, **options))
    warnings = said(caplog)
    assert len(warnings) == bool(message) and message in "".join(warnings)
    if message:
        more: dict[str, Any] = {"checkpoint": {"exclude_from_loading": ["optimizer.param_groups"]}}
        run = train(tmp_path, 5, schedule, lambda parameters: sgd(parameters, **options), **more)
        assert not said(caplog)
        (group,) = run.optimizer.param_groups
        for name, value in options.items():
            done = (0.01 if schedule else 1.0) if name == "lr" else 1.0
            assert group[name] == pytest.approx(value * done)


def test_other_values_of_every_group_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(*rates: float, **options: Any) -> Make:
        return lambda parameters: SGD(
            [{"params": [each], "lr": rate} for each, rate in zip(parameters, rates)], **options
        )

    train(tmp_path, 3, None, groups(0.1, 0.2))
    said(caplog)
    train(tmp_path, 4, None, groups(0.3, 0.4, weight_decay=0.5))
    (line,) = said(caplog)
    for value in ("lr=0.1 (here 0.3)", "lr=0.2 (here 0.4)", "weight_decay=0 (here 0.5)"):
        assert line.count(value) == 1  # what groups share is said once


def change(run: Run) -> None:
    run.scheduler.gamma *= 0.9
    for group in run.optimizer.param_groups:
        group["weight_decay"] += 0.01


def replace(run: Run) -> None:
    run.scheduler = schedules.ExponentialLR(run.optimizer, 0.8)


def replace_alike(run: Run) -> None:
    run.scheduler = schedules.StepLR(run.optimizer, 1, gamma=0.7)


@pytest.mark.parametrize("hook", [change, replace, replace_alike])
def test_what_a_hook_changes_or_replaces_is_neither_named_nor_refused(
    hook: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def schedule(optimizer: Any) -> Any:
        return schedules.StepLR(optimizer, 2, gamma=0.9)

    whole = train(tmp_path / "whole", 6, schedule, hook=hook)
    train(tmp_path / "parts", 4, schedule, hook=hook)
    resumed = train(tmp_path / "parts", 6, schedule, hook=hook)
    assert torch.equal(weight(resumed), weight(whole))
    assert not said(caplog)


@pytest.mark.parametrize("stop", [3, 4])
def test_schedule_that_a_hook_has_replaced_once_is_refused_before_an_update(
    stop: int, tmp_path: Path
) -> None:
    def schedule(optimizer: Any) -> Any:
        return schedules.StepLR(optimizer, 2, gamma=0.9)

    def once(run: Run) -> None:
        if run.state.train.epoch == 1:
            replace(run)

    # In the middle of a pass no hook is called; at the begin of another one this hook does nothing.
    train(tmp_path, stop, schedule, hook=once)
    with pytest.raises(CheckpointMismatch, match="state of StepLR.* a hook has replaced the sch"):
        train(tmp_path, 6, schedule, hook=once)


def test_schedules_by_a_function_are_told_apart(tmp_path: Path) -> None:
    train(tmp_path, 3, lambda o: schedules.LambdaLR(o, Power(0.9)))
    with pytest.raises(CheckpointMismatch, match="state of MultiplicativeLR.* that of LambdaLR"):
        train(tmp_path, 6, lambda o: schedules.MultiplicativeLR(o, Power(0.9)))


np: Any = numpy
OF_NUMPY: dict[str, tuple[Make | None, Make]] = {
    "integer": (lambda o: schedules.CosineAnnealingLR(o, np.int64(5)), sgd),
    "float32": (lambda o: schedules.CosineAnnealingLR(o, 5, eta_min=np.float32(0.01)), sgd),
    "array": (lambda o: schedules.MultiStepLR(o, np.array([2, 4])), sgd),
    "sequence": (
        lambda o: schedules.SequentialLR(
            o,
            [schedules.ConstantLR(o), schedules.ExponentialLR(o, np.float32(0.9))],
            np.array([2]),
        ),
        sgd,
    ),
    "function": (lambda o: schedules.LambdaLR(o, lambda step: np.float32(0.9) ** step), sgd),
    "rate": (lambda o: schedules.StepLR(o, 1, 0.9), lambda p: sgd(p, lr=np.float32(0.1))),
    "betas": (None, lambda p: Adam(p, lr=np.float32(0.1), betas=np.array([0.9, 0.95]))),
}


BEGINNING: dict[str, tuple[Make, Make]] = {
    "cosine": (
        partial(schedules.CosineAnnealingLR, T_max=3),
        partial(schedules.StepLR, step_size=2),
    ),
    "warmup": (
        partial(schedules.StepLR, step_size=1, gamma=0.5),
        partial(schedules.LinearLR, start_factor=0.25, total_iters=4),
    ),
    "momentum": (
        partial(schedules.OneCycleLR, max_lr=0.2, total_steps=9),
        partial(schedules.OneCycleLR, max_lr=0.1, total_steps=7),
    ),
    "closed form": (
        partial(schedules.CosineAnnealingLR, T_max=3),
        partial(schedules.LambdaLR, lr_lambda=Power(0.5)),
    ),
}


@pytest.mark.parametrize("case", BEGINNING)
def test_schedule_that_is_left_out_begins_with_its_own_rates(case: str, tmp_path: Path) -> None:
    first, second = BEGINNING[case]
    sizes: dict[str, Any] = {"dataloader": {"batch_size": 8, "shuffle": False}}
    before = train(tmp_path / "first", 3, first, **sizes)
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(before.unwrapped_model.state_dict())
    found = train(
        tmp_path / "second",
        6,
        second,
        **sizes,
        resume=str(tmp_path / "first/checkpoints/latest.pth"),
        checkpoint={"exclude_from_loading": ["scheduler"]},
    )
    # By hand: the moments of the checkpoint, and a schedule over an optimizer that has just been made.
    optimizer: Any = sgd(model.parameters())
    schedule = second(optimizer)
    of_checkpoint: Any = before.optimizer
    for own, theirs in zip(model.parameters(), before.unwrapped_model.parameters()):
        optimizer.state[own]["momentum_buffer"] = of_checkpoint.state[theirs]["momentum_buffer"]
    inputs, targets = before.datasets["train"].tensors
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(weight(found), model.weight.detach())


def test_schedule_that_the_program_has_no_more_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 4, partial(schedules.StepLR, step_size=2, gamma=0.5))
    said(caplog)
    run: Any = train(tmp_path, 6, None)
    (line,) = said(caplog)
    assert "had a schedule, StepLR, and this one has none" in line and "0.025 (here 0.1)" in line
    assert run.optimizer.param_groups[0]["lr"] == 0.025


def _in_sequence(optimizer: Any, function: Any) -> Any:
    parts: list[Any] = [
        schedules.ConstantLR(optimizer, 0.5, 9),
        schedules.LambdaLR(optimizer, function),
    ]
    return schedules.SequentialLR(optimizer, parts, [1])


# The rates after 3 updates with a function that is 0.5 ** step and with one that is 0.25 ** step.
BY_FUNCTION: dict[str, tuple[Make, float, float]] = {
    "LambdaLR": (schedules.LambdaLR, 0.1 * 0.5**3, 0.1 * 0.25**3),
    "MultiplicativeLR": (schedules.MultiplicativeLR, 0.1 * 0.5**6, 0.1 * 0.25**6),
    "in a sequence": (_in_sequence, 0.1 * 0.5**2, 0.1 * 0.25**2),
}


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_function_that_gives_another_rate_is_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, before, after = BY_FUNCTION[name]

    def make(base: float, scale: float = 1.0) -> Make:
        return lambda optimizer: kind(optimizer, lambda step: base**step * scale**step)

    train(tmp_path, 3, make(0.5))
    rate: dict[str, Any] = {"checkpoint": {"exclude_from_loading": ["optimizer.param_groups"]}}
    train(tmp_path / "rate", 3, make(0.5))
    said(caplog)
    # The same function, of a program that asks for another rate.
    train(tmp_path / "rate", 4, make(0.5), partial(sgd, lr=0.3), **rate)
    train(tmp_path / "rate", 5, make(0.5), partial(sgd, lr=0.3), **rate)
    assert not said(caplog)
    # As many updates as before, so that nothing else has changed.
    for steps, function, count in ((3, make(0.25), 1), (4, make(0.5), 0), (5, make(0.5, 0.5), 0)):
        caplog.clear()
        with caplog.at_level("INFO", logger="danling"):
            train(tmp_path, steps, function)
        lines = [line for line in caplog.records if "The function of the schedule" in line.message]
        assert [line.levelname for line in lines].count("WARNING") == count
        if steps != 4:
            (line,) = lines
            assert line.levelname == ("WARNING" if count else "INFO")
        if count:
            assert f"{after:.6g} (before {before:.6g})" in line.getMessage()


class Counting(Small):
    """The factor of its rate is a method that counts its calls, or one that has a table of the rest of the run alone."""

    not_saved = ("rates", "begins_at")

    def __init__(self, config: Any, begins_at: int | None) -> None:
        super().__init__(config)
        self.calls, self.begins_at = 0, begins_at
        self.rates: list[float] = []
        self.optimizer = sgd(self.model.parameters())
        factor = self.factor if begins_at is None else self.factor_of_table
        self.scheduler = schedules.LambdaLR(self.optimizer, factor)

    def factor(self, _: int) -> float:
        self.calls += 1
        return 0.5**self.calls

    def factor_of_table(self, step: int) -> float:
        return {0: 0.5, **{at: 0.5 ** (at + 1) for at in range(self.begins_at or 0, 9)}}[step]

    def train_step(self, data: Any) -> Any:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        if self.state.train.global_step == 2:
            self.stop()
        return super().train_step(data)


@pytest.mark.parametrize("begins_at", [None, 4])
def test_comparing_a_function_changes_nothing(
    begins_at: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, steps=6, auto_resume=True, optim={})
    with Counting(config, begins_at and 0) as run:
        run.train()
    said(caplog)
    with Counting(config, begins_at) as resumed:
        resumed.train()
    assert run.rates + resumed.rates == [0.1 * 0.5**count for count in range(1, 7)]
    assert not said(caplog)


@pytest.mark.parametrize(
    "make",
    [
        partial(schedules.LambdaLR, lr_lambda=lambda step: 0.9**step),
        partial(schedules.ExponentialLR, gamma=0.9),
        partial(schedules.CosineAnnealingLR, T_max=8),
    ],
)
def test_new_optimizer_begins_where_the_schedule_is(make: Make, tmp_path: Path) -> None:
    train(tmp_path / "first", 3, make)
    config = settings(tmp_path / "second", steps=5, optim={})
    config["resume"] = str(tmp_path / "first/checkpoints/latest.pth")
    config["checkpoint"] = {"exclude_from_loading": ["optimizer"]}
    optimizer = Adam([torch.zeros(1, requires_grad=True)], lr=0.2)
    schedule = make(optimizer)
    rates = []
    for _ in range(5):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    with Run(config, partial(Adam, lr=0.2), make, None) as run:
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(rates[2])
        run.train()
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(rates[4])


@pytest.mark.parametrize("name", OF_NUMPY)
def test_numbers_of_numpy_are_saved_and_come_back(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, optimizer = OF_NUMPY[name]
    whole = train(tmp_path / "whole", 6, schedule, optimizer)
    train(tmp_path / "parts", 3, schedule, optimizer)
    resumed = train(tmp_path / "parts", 6, schedule, optimizer)
    assert torch.equal(weight(resumed), weight(whole))
    rates = [group["lr"] for run in (whole, resumed) for group in run.optimizer.param_groups]
    assert rates[0] == rates[1]
    assert not said(caplog)


class OfOlderVersion(Run):
    """Reads a checkpoint as a version has written it that did not save the options which were asked for."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state["state"]["asked_options"]
        super().load_state_dict(state)


def test_what_a_schedule_moves_is_no_other_option_of_an_older_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_cycle = partial(schedules.OneCycleLR, max_lr=0.2, total_steps=9)
    train(tmp_path, 2, one_cycle)
    config = settings(tmp_path, steps=4, auto_resume=True, optim={})
    with OfOlderVersion(config, sgd, one_cycle, None) as run:
        run.train()
    assert not [line for line in caplog.messages if "differ from those of the program" in line]


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_options_are_compared_with_a_checkpoint_of_an_older_version(
    rate: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: what is saved then has the options that this program asks for."""
    train(tmp_path, 2, None)
    config = settings(tmp_path, steps=4, auto_resume=True, optim={})
    with OfOlderVersion(config, partial(sgd, lr=rate), None, None) as run:
        run.train()
    lines = [line for line in caplog.messages if "differ from those of the program" in line]
    assert [f"lr=0.1 (here {rate})" in line for line in lines] == [True] * (rate != 0.1)
    caplog.clear()
    train(tmp_path, 6, None, partial(sgd, lr=rate))
    assert not [line for line in caplog.messages if "differ from those of the program" in line]
