"""An optimizer and a schedule out of plain settings, beside those that torch builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from danling.optim.building import build_optimizer, build_scheduler, check_metric_of_schedule, scheduler_interval

CPU = torch.device("cpu")


def model() -> nn.Module:
    """A model of which the last layer is frozen."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[1].requires_grad_(False)
    return layers


def test_only_what_is_trained_is_updated_as_torch_does() -> None:
    ours, theirs = model(), model()
    built = build_optimizer({"type": "sgd", "lr": 0.1, "momentum": 0.9}, ours.named_parameters, device=CPU)
    torchs = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(3):
        for net, optimizer in ((ours, built), (theirs, torchs)):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
    assert [len(group["params"]) for group in built.param_groups] == [2]
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(mine, other)


def test_groups_by_pattern() -> None:
    groups = [{"pattern": r"bias$", "weight_decay_multiplier": 0.0}]
    settings = {"type": "adamw", "lr": 0.1, "weight_decay": 0.5, "param_groups": groups}
    built = build_optimizer(settings, model().named_parameters, device=CPU)
    assert {group["weight_decay"]: len(group["params"]) for group in built.param_groups} == {0.0: 1, 0.5: 1}
    assert "param_groups" in settings


def test_a_rank_that_holds_nothing_trained_gets_an_empty_optimizer() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    whole = {"0.weight": True, "1.weight": False}
    built = build_optimizer({"type": "adamw", "lr": 0.1}, frozen.named_parameters, device=CPU, whole=whole)
    assert [group["params"] for group in built.param_groups] == [[]] and built.param_groups[0]["lr"] == 0.1
    built.step()
    with pytest.raises(ValueError, match="Unfreeze a layer"):
        build_optimizer({"type": "adamw", "lr": 0.1}, frozen.named_parameters, device=CPU)


@pytest.mark.parametrize(
    ("settings", "steps", "epochs", "length"),
    [
        ({"type": "linear"}, 10, None, 10),
        ({"type": "linear", "interval": "epoch"}, 10, 4, 4),
        ({"type": "linear", "total_steps": 7}, 10, None, 7),
    ],
)
def test_a_schedule_over_the_whole_run_reaches_its_end(
    settings: dict[str, Any], steps: int | None, epochs: int | None, length: int
) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    schedule = build_scheduler(settings, optimizer, steps=steps, epochs=epochs)
    rates = []
    for _ in range(length):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_a_section_without_a_type_is_refused_and_none_gives_none() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    assert build_scheduler({}, optimizer, steps=1, epochs=None) is None
    with pytest.raises(ValueError, match=r"scheduler.type.*scheduler.final_lr=0"):
        build_scheduler({"interval": "step", "final_lr": 0}, optimizer, steps=1, epochs=None)


def test_a_schedule_by_a_metric_needs_one() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    assert scheduler_interval({}, plateau) == "epoch" == scheduler_interval({}, name="ReduceLROnPlateau")
    assert scheduler_interval({}, cosine) == "step" == scheduler_interval({}, name="cosine")
    assert scheduler_interval({"interval": "validation"}, cosine) == "validation"
    with pytest.raises(ValueError, match="scheduler.interval='step'"):
        check_metric_of_schedule(plateau, interval="step", evaluates=True, monitors=True)
    with pytest.raises(ValueError, match="an evaluation split"):
        check_metric_of_schedule(plateau, interval="epoch", evaluates=False, monitors=False)
    for scheduler in (None, cosine):
        check_metric_of_schedule(scheduler, interval="step", evaluates=False, monitors=False)
    check_metric_of_schedule(plateau, interval="epoch", evaluates=False, monitors=True)


def test_a_schedule_by_a_metric_that_is_told_its_epoch_alone_is_refused() -> None:
    class PlateauLRScheduler:
        """Has the methods of the one of timm."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

        def step(self, epoch: int, metric: float | None = None) -> None:
            """Advance by the metric, if there is one."""

        def step_update(self, num_updates: int, metric: float | None = None) -> None:
            """Do nothing."""

    scheduler = PlateauLRScheduler(torch.optim.SGD(model().parameters(), lr=1.0))
    with pytest.raises(ValueError, match="a PlateauLRScheduler, which leaves the learning rate as it is"):
        check_metric_of_schedule(scheduler, interval="epoch", evaluates=True, monitors=False)
