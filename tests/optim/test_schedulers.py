"""Schedules by name: of torch and with a warm-up, the same after a resume at every step."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from danling.optim import SCHEDULERS, needs_metric
from danling.optim.registry import (
    build_scheduler,
    check_metric_of_schedule,
    scheduler_interval,
)
from danling.optim.schedule_state import load_schedule

_STEPS = 24


def _half_every_five(step: int) -> float:
    return 0.5 ** (step // 5)


_OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"total_steps": 20, "warmup_steps": 5},
    "cosine": {"total_steps": 20, "warmup_steps": 5, "final_lr_ratio": 0.1},
    "constant": {"warmup_steps": 5},
    "wsd": {"total_steps": 20, "warmup_steps": 5, "decay_steps": 8},
    "lambdalr": {"lr_lambda": _half_every_five},
    "multiplicativelr": {"lr_lambda": _half_every_five},
    "steplr": {"step_size": 3},
    "multisteplr": {"milestones": [4, 9, 9]},
    "constantlr": {},
    "linearlr": {"total_iters": 10},
    "exponentiallr": {"gamma": 0.9},
    "polynomiallr": {"total_iters": 15, "power": 2.0},
    "cosineannealinglr": {"T_max": 7},
    "cosineannealingwarmrestarts": {"T_0": 4, "T_mult": 2},
    "cycliclr": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "mode": "triangular2"},
    "onecyclelr": {"max_lr": 0.3, "total_steps": 30, "three_phase": True},
    "reducelronplateau": {"patience": 1, "cooldown": 1},
    "swalr": {"swa_lr": 0.02, "anneal_epochs": 7},
    "sequentiallr": {
        "schedulers": [
            {"type": "linearlr", "start_factor": 0.1, "total_iters": 4},
            {"type": "cosineannealingwarmrestarts", "T_0": 4},
            {"type": "exponentiallr", "gamma": 0.8},
        ],
        "milestones": [4, 13],
    },
    "chainedscheduler": {
        "schedulers": [
            {"type": "linearlr", "total_iters": 6},
            {"type": "ExponentialLR", "gamma": 0.9},
            {"type": "steplr", "step_size": 5},
        ]
    },
}


def _build(name: str, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    weight = nn.Parameter(torch.linspace(-1, 1, 5))
    bias = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(
        [{"params": [weight]}, {"params": [bias], "lr": 0.05}], lr=0.1, momentum=0.9
    )
    if name == "swalr":
        # Otherwise the first group alone would have one.
        options = {"swa_lr": [0.02, 0.01], "anneal_epochs": 7}
    return optimizer, SCHEDULERS.build(
        optimizer, type=name, **copy.deepcopy(_OPTIONS[name] if options is None else options)
    )


def _run(optimizer: Any, scheduler: Any, begin: int, end: int) -> list[Any]:
    trace = []
    for step in range(begin, end):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 0.1
        trace.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step(*([abs(step - 8.0)] if needs_metric(scheduler) else []))
        trace.append(
            [
                parameter.tolist()
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
        )
    return trace


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_scheduler_of_torch_is_known_and_tested() -> None:
    exported = [getattr(lr_scheduler, name) for name in lr_scheduler.__all__]
    names = {cls.__name__.lower() for cls in exported if inspect.isclass(cls)} - {"lrscheduler"}
    assert names <= {name.lower() for name in SCHEDULERS.names()}
    assert set(SCHEDULERS.names()) == set(_OPTIONS)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", _OPTIONS)
def test_resumed_at_every_step_the_trace_is_the_same(name: str) -> None:
    whole = _run(*_build(name), 0, _STEPS)
    for stop in range(_STEPS):
        optimizer, scheduler = _build(name)
        _run(optimizer, scheduler, 0, stop)
        state = _through_a_file(
            [
                optimizer.state_dict(),
                scheduler.state_dict(),
                optimizer.param_groups[0]["params"][0].data,
            ]
        )
        other = optimizer.param_groups[1]["params"][0].data.clone()
        optimizer, scheduler = _build(name)
        optimizer.param_groups[0]["params"][0].data.copy_(state[2])
        optimizer.param_groups[1]["params"][0].data.copy_(other)
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        with warnings.catch_warnings():
            # A resumed scheduler must not complain about the order of the first steps.
            warnings.filterwarnings("error", message="Detected call of")
            assert _run(optimizer, scheduler, stop, _STEPS) == whole[2 * stop :], (
                f"stopped at {stop}"
            )


def test_only_metric_schedulers_need_a_metric() -> None:
    assert [name for name in _OPTIONS if needs_metric(_build(name)[1])] == ["reducelronplateau"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "cosin", "total_steps": 3}, "Received: type='cosin'. Did you mean 'cosine'"),
        ({"type": "cosine", "total_step": 3}, "Received: 'total_step'. Did you mean 'total_steps'"),
        ({"type": "steplr"}, "'steplr' to be given step_size"),
        ({"type": "chainedscheduler"}, "'chainedscheduler' to be given schedulers"),
        ({"type": "chainedscheduler", "schedulers": [{"type": "stplr"}]}, "Did you mean 'steplr'"),
        ({}, "constant, .*Received: type=None"),
    ],
)
def test_bad_input_names_the_mend(options: dict[str, Any], message: str) -> None:
    optimizer, _ = _build("constant")
    with pytest.raises(ValueError, match=message):
        SCHEDULERS.build(optimizer, **options)


def test_a_users_scheduler_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULERS, "_known", dict(SCHEDULERS._known))

    @SCHEDULERS.register("inverse_sqrt")
    def inverse_sqrt(target: Any, scale: float = 1.0) -> Any:
        return lr_scheduler.LambdaLR(target, lambda step: scale / (step + 1) ** 0.5)

    optimizer, _ = _build("constant")
    assert SCHEDULERS.build(optimizer, type="inverse-sqrt", scale=2.0).get_last_lr() == [0.2, 0.1]


def test_a_section_without_a_type_is_refused_and_the_length_of_the_run_is_filled_in() -> None:
    optimizer, _ = _build("constant")
    assert build_scheduler({}, optimizer, steps=1, epochs=None) is None
    with pytest.raises(ValueError, match=r"scheduler.type.*scheduler.final_lr=0"):
        build_scheduler({"interval": "step", "final_lr": 0}, optimizer, steps=1, epochs=None)
    for more, length in (({}, 10), ({"interval": "epoch"}, 4), ({"total_steps": 7}, 7)):
        built: Any = build_scheduler({"type": "linear", **more}, optimizer, steps=10, epochs=4)
        assert built.total_steps == length


def test_a_schedule_by_a_metric_needs_one() -> None:
    optimizer = _build("constant")[0]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    assert (
        scheduler_interval({}, plateau)
        == "epoch"
        == scheduler_interval({}, name="ReduceLROnPlateau")
    )
    assert scheduler_interval({}, cosine) == "step" == scheduler_interval({}, name="cosine")
    assert scheduler_interval({"interval": "validation"}, cosine) == "validation"
    with pytest.raises(ValueError, match="scheduler.interval='step'"):
        check_metric_of_schedule(plateau, interval="step", evaluates=True, monitors=True)
    with pytest.raises(ValueError, match="an evaluation split"):
        check_metric_of_schedule(plateau, interval="epoch", evaluates=False, monitors=False)
    for scheduler in (None, cosine):
        check_metric_of_schedule(scheduler, interval="step", evaluates=False, monitors=False)
    check_metric_of_schedule(plateau, interval="epoch", evaluates=False, monitors=True)


def test_metric_schedule_with_an_epoch_alone_is_refused() -> None:
    class PlateauLRScheduler:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

        def step(self, epoch: int, metric: float | None = None) -> None:
            """Advance by the metric, if there is one."""

        def step_update(self, num_updates: int, metric: float | None = None) -> None:
            """Do nothing."""

    scheduler = PlateauLRScheduler(_build("constant")[0])
    with pytest.raises(
        ValueError, match="a PlateauLRScheduler, whose step without a metric does not change"
    ):
        check_metric_of_schedule(scheduler, interval="epoch", evaluates=True, monitors=False)


# Warm-up


def _optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (1.0,)]
    )


def _trace(steps: int, **options: Any) -> list[float]:
    """Return the rates of updates 0, 1, ... and the one after the last."""
    optimizer = _optimizer()
    scheduler = SCHEDULERS.build(optimizer, **options)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "wsd"])
def test_the_warmup_begins_with_a_whole_step_and_ends_at_the_base(name: str) -> None:
    rates = _trace(10, type=name, total_steps=20, warmup_steps=4)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert _trace(3, type=name, total_steps=20)[0] == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19, 20])
def test_the_end_is_exact_and_lasts(name: str, final: float, warmup: int) -> None:
    rates = _trace(25, type=name, total_steps=20, warmup_steps=warmup, final_lr_ratio=final)
    assert rates[20:] == [final] * 6
    assert all(
        later <= earlier
        for earlier, later in zip(rates[max(warmup, 1) :], rates[max(warmup, 1) + 1 :])
    )
    # No update is wasted at zero.
    assert min(rates[:20]) > 0


def test_shapes() -> None:
    assert _trace(20, type="linear", total_steps=20, warmup_steps=10)[15] == 0.5
    cosine = _trace(20, type="cosine", total_steps=20, warmup_steps=10, final_lr_ratio=0.2)
    assert cosine[13] == pytest.approx(0.2 + 0.8 * (1 + math.cos(0.3 * math.pi)) / 2)
    wsd = _trace(20, type="wsd", total_steps=20, warmup_steps=5, decay_steps=4)
    assert wsd[5:17] == [1.0] * 12
    assert wsd[17:] == [0.75, 0.5, 0.25, 0.0]
    assert _trace(5, type="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_too_long_decay_begins_after_the_warmup() -> None:
    assert _trace(4, type="wsd", total_steps=4, warmup_steps=2, decay_steps=100) == [
        0.5,
        1.0,
        1.0,
        0.5,
        0.0,
    ]
    assert _trace(4, type="wsd", total_steps=4, decay_steps=0) == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"total_steps": 0},
        {"total_steps": 5, "warmup_steps": -1},
        {"total_steps": 5, "final_lr_ratio": -0.1},
    ],
)
def test_bad_figures_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected scheduler\."):
        SCHEDULERS.build(_optimizer(), type="cosine", **options)


def test_a_warmup_longer_than_the_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="danling"):
        assert _trace(2, type="cosine", total_steps=2, warmup_steps=4) == [0.25, 0.5, 0.75]
    assert "never reaches its base" in caplog.text


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "onecyclelr"])
def test_lengthened_resumed_run_follows_the_longer_curve(name: str) -> None:
    def build(total: int) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        more = {"max_lr": 1.0} if name == "onecyclelr" else {"warmup_steps": 3}
        return optimizer, SCHEDULERS.build(optimizer, type=name, total_steps=total, **more)

    def run(optimizer: Any, scheduler: Any, steps: int) -> list[tuple[float, float]]:
        trace = []
        for _ in range(steps):
            trace.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
            optimizer.step()
            scheduler.step()
        return trace

    optimizer, scheduler = build(10)
    run(optimizer, scheduler, 10)
    longer, resumed = build(30)
    longer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == [longer.param_groups[0]["lr"]]
    assert run(longer, resumed, 20) == run(*build(30), 30)[10:]


def test_a_state_of_other_groups_is_refused() -> None:
    state = SCHEDULERS.build(_optimizer(1.0, 2.0), type="cosine", total_steps=5).state_dict()
    with pytest.raises(ValueError, match="over 1 parameter groups"):
        SCHEDULERS.build(_optimizer(), type="cosine", total_steps=5).load_state_dict(state)
    with pytest.raises(ValueError, match="base_lrs=None"):
        SCHEDULERS.build(_optimizer(), type="cosine", total_steps=5).load_state_dict({"best": 1.0})


def _exponential(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def _parts(optimizer: Any, step_size: int = 2) -> list[Any]:
    return [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, step_size)]


def _in_sequence(step_size: int, milestone: int = 2) -> Any:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, _parts(optimizer, step_size), [milestone]
    )


def _three(optimizer: Any) -> Any:
    parts = [*_parts(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2, 4])


def _chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(_parts(optimizer))


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
            "anneal_epochs=10",
        ),
        (lambda o: lr_scheduler.StepLR(o, 2), _exponential, "step_size=2"),
        (_exponential, lambda o: lr_scheduler.StepLR(o, 2), "no ['step_size']"),
        (_exponential, _in_sequence(2), "gamma=0.5"),
        (_in_sequence(2), _three, "made of 2"),
        (_three, _in_sequence(2), "made of 3"),
        (_chained, _in_sequence(2), "no ['last_epoch']"),
        (_in_sequence(2), _chained, "last_epoch=0"),
    ],
)
def test_a_state_of_another_schedule_is_refused(saved: Any, now: Any, message: str) -> None:
    state = saved(_optimizer()).state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        load_schedule(now(_optimizer()), state)
