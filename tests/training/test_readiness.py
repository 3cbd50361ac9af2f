"""Whether a run may train, asked without a runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from danling.distributed import LocalDomain
from danling.training.preparation import ModelPreparation
from danling.training.readiness import Readiness, check_components, takes_closure


class Given:
    """Components as a user sets them."""

    def __init__(self, **given: Any) -> None:
        self.model: Any = nn.Linear(2, 2)
        self.criterion: Any = nn.CrossEntropyLoss()
        self.ema = self.scheduler = self.metrics = None
        self.datasets: Any = {"train": [1]}
        self.dataloaders: Any = {}
        self.epochs: int | None = 1
        self.world, self.stack, self.distributed, self.is_main_process = LocalDomain(), "ddp", False, True
        self.config: dict[str, Any] = {}
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        vars(self).update(given)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()


def readiness(given: Given, *own: str, built: Any = None, interval: str = "step") -> Readiness:
    run: Any = given
    run.preparation = ModelPreparation(LocalDomain())
    run.preparation.note_constructed(built or given.model)
    run._overrides = own.__contains__
    run._parts = SimpleNamespace(scheduler_interval=lambda: interval)
    return Readiness(run)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": nn.Linear}, "Make an instance of it"),
        ({"criterion": nn.CrossEntropyLoss}, r"Write CrossEntropyLoss\(\)"),
        ({"optimizer": "adam"}, "`self.optimizer` to be a torch.optim.Optimizer"),
        ({"scheduler": "cosine"}, "`self.scheduler` to be a scheduler"),
        ({"metrics": {"loss": max}}, "a metric called 'loss'"),
        ({"datasets": [1, 2]}, "`self.datasets` to be a mapping by split"),
        ({"dataloaders": {"train": iter([1])}, "epochs": 2}, "iterated again in each of 2 epochs"),
    ],
)
def test_a_slip_among_the_components_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_components(cast(Any, Given(**given)), [], reserved=["loss"])
    check_components(cast(Any, Given()), [], reserved=["loss"])


def test_an_optimizer_is_needed_that_takes_the_gradient_as_it_is_and_trains_the_model() -> None:
    with pytest.raises(ValueError, match=r"Received: optimizer=None. Assign"):
        readiness(Given(optimizer=None)).check_optimizer()
    with pytest.raises(ValueError, match=r"`build_optimizer` returned none"):
        readiness(Given(optimizer=None), "build_optimizer").check_optimizer_given()
    given = Given()
    given.optimizer = torch.optim.LBFGS(given.model.parameters())
    assert takes_closure(given.optimizer) and not takes_closure(Given().optimizer) and not takes_closure(object())
    with pytest.raises(ValueError, match="LBFGS, whose step calls a closure"):
        readiness(given).check_optimizer()
    with pytest.raises(ValueError, match="an optimizer over parameters of the model"):
        readiness(Given(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))).check_optimizer()


def test_another_model_than_that_of_construction_is_refused_where_more_belongs_to_it() -> None:
    given, other = Given(), nn.Linear(2, 2)
    readiness(given, built=other).check_optimizer()
    for changed in ({"distributed": True}, {"stack": "deepspeed"}, {"ema": object()}):
        given = Given(**changed)
        with pytest.raises(ValueError, match="the model that the runner was constructed with"):
            readiness(given, built=other).check_optimizer()


def test_what_the_optimizer_leaves_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    given = Given()
    given.optimizer = torch.optim.SGD([given.model.weight], lr=0.1)
    ready = readiness(given)
    with caplog.at_level(logging.WARNING, "danling"):
        ready.check_optimizer()
        ready.check_optimizer()
        given.is_main_process = False
        readiness(given).check_optimizer()
    assert len(caplog.messages) == 1 and "bias" in caplog.text


def test_a_schedule_by_a_metric_needs_an_evaluation() -> None:
    given = Given()
    given.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(given.optimizer)  # type: ignore[assignment]
    readiness(given, interval="epoch").check_schedule(evaluates=True)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        readiness(given, interval="epoch").check_schedule(evaluates=False)


def test_what_nobody_has_set_is_named() -> None:
    assert readiness(Given()).unset() == ["scheduler"]
    bare: Any = SimpleNamespace(**{**vars(Given()), "criterion": None, "optimizer": None, "datasets": {}})
    assert readiness(bare).unset() == ["criterion", "optimizer", "scheduler", "datasets", "dataloaders"]
    assert "criterion" not in readiness(bare, "train_step").unset()
