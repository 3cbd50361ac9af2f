from __future__ import annotations

import copy
import inspect
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from danling.optim import SCHEDULERS, needs_metric

_STEPS = 24


def _half_every_five(step: int) -> float:
    return 0.5 ** (step // 5)


class _Decay:
    """A callable with a state of its own, which torch saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


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
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.05}], lr=0.1, momentum=0.9)
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
        trace.append([parameter.tolist() for group in optimizer.param_groups for parameter in group["params"]])
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
            [optimizer.state_dict(), scheduler.state_dict(), optimizer.param_groups[0]["params"][0].data]
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
            assert _run(optimizer, scheduler, stop, _STEPS) == whole[2 * stop :], f"stopped at {stop}"


@pytest.mark.parametrize("name", ["onecyclelr", "cycliclr"])
def test_momentum_cycles_of_adam_resume(name: str) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, SCHEDULERS.build(optimizer, type=name, **_OPTIONS[name])

    def betas(optimizer: Any, scheduler: Any, steps: int) -> list[Any]:
        trace = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            trace.append((optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]))
        return trace

    whole = betas(*build(), 20)
    first, resumed = build(), build()
    betas(*first, 7)
    for after, before in zip(resumed, first):
        after.load_state_dict(_through_a_file(before.state_dict()))
    assert betas(*resumed, 13) == whole[7:]


def test_a_callable_object_of_lambda_lr_keeps_its_state() -> None:
    whole = _run(*_build("lambdalr", {"lr_lambda": _Decay()}), 0, 10)
    optimizer, scheduler = _build("lambdalr", {"lr_lambda": _Decay()})
    _run(optimizer, scheduler, 0, 4)
    state = _through_a_file([optimizer.state_dict(), scheduler.state_dict()])
    resumed, schedule = _build("lambdalr", {"lr_lambda": _Decay()})
    resumed.load_state_dict(state[0])
    schedule.load_state_dict(state[1])
    assert _run(resumed, schedule, 4, 10)[::2] == whole[8::2]


@pytest.mark.parametrize("name", _OPTIONS)
def test_states_hold_plain_values(name: str) -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                check(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (bool, int, float, str)

    check(_build(name)[1].state_dict())


def test_only_metric_schedulers_need_a_metric() -> None:
    assert [name for name in _OPTIONS if needs_metric(_build(name)[1])] == ["reducelronplateau"]

    class Own:
        def step(self, metric: float) -> None: ...

    assert needs_metric(Own())


def test_plateau_lowers_the_rate_when_the_metric_stays() -> None:
    optimizer, scheduler = _build("reducelronplateau", {"patience": 1, "factor": 0.5, "mode": "max"})
    for value in (0.1, 0.2, 0.2, 0.2):
        scheduler.step(value)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_schedulers_that_exist_may_be_parts() -> None:
    optimizer, first = _build("exponentiallr")
    chained = SCHEDULERS.build(optimizer, type="ChainedScheduler", schedulers=[first])
    optimizer.step()
    chained.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)


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
    monkeypatch.setattr(SCHEDULERS, "_builders", dict(SCHEDULERS._builders))
    monkeypatch.setattr(SCHEDULERS, "_names", dict(SCHEDULERS._names))

    @SCHEDULERS.register("inverse_sqrt")
    def inverse_sqrt(target: Any, scale: float = 1.0) -> Any:
        return lr_scheduler.LambdaLR(target, lambda step: scale / (step + 1) ** 0.5)

    optimizer, _ = _build("constant")
    assert SCHEDULERS.build(optimizer, type="inverse-sqrt", scale=2.0).get_last_lr() == [0.2, 0.1]
