from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from danling.optim import SCHEDULERS


def _optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (1.0,)])


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
    assert all(later <= earlier for earlier, later in zip(rates[max(warmup, 1) :], rates[max(warmup, 1) + 1 :]))
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


def test_shares_of_the_run() -> None:
    assert _trace(100, type="linear", total_steps=100, warmup_steps=0.29) == _trace(
        100, type="linear", total_steps=100, warmup_steps=29
    )
    assert _trace(10, type="wsd", total_steps=10, decay_steps=0.5)[5:7] == [1.0, 0.8]
    assert _trace(3, type="constant", total_steps=20, warmup_steps=0.1) == [0.5, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="total_steps"):
        _trace(3, type="constant", warmup_steps=0.1)


def test_a_decay_that_is_too_long_begins_after_the_warmup() -> None:
    assert _trace(4, type="wsd", total_steps=4, warmup_steps=2, decay_steps=100) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert _trace(4, type="wsd", total_steps=4, decay_steps=0) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_every_group_keeps_its_own_base() -> None:
    optimizer = _optimizer(1.0, 10.0)
    SCHEDULERS.build(optimizer, type="cosine", total_steps=20, warmup_steps=4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.5]


@pytest.mark.parametrize(
    "options",
    [{}, {"total_steps": 0}, {"total_steps": 5, "warmup_steps": -1}, {"total_steps": 5, "final_lr_ratio": -0.1}],
)
def test_bad_figures_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected scheduler\."):
        SCHEDULERS.build(_optimizer(), type="cosine", **options)


def test_a_warmup_longer_than_the_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="danling"):
        assert _trace(2, type="cosine", total_steps=2, warmup_steps=4) == [0.25, 0.5, 0.75]
    assert "never reaches its base" in caplog.text


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "onecyclelr"])
def test_a_resumed_run_that_became_longer_follows_the_longer_curve(name: str) -> None:
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
