"""One update without a runner: what a closed window becomes, and what advances with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.keys import own_keys
from torch import Tensor, nn

from danling.distributed import LocalDomain, StepSync, StepTotals
from danling.metrics import Meters
from danling.training import NonFiniteError, Precision, TrainingSession, UpdateOutcome, Window
from danling.training.preparation import ModelPreparation
from danling.training.reduction import LocalReduction
from danling.training.update import UpdateStep

CPU = torch.device("cpu")


class Run:
    """A linear model of one weight, whose loss is its output, and every hook by its default."""

    def __init__(self, **settings: Any) -> None:
        own_backward = settings.pop("own_backward", False)
        self.config = SimpleNamespace(**{"skip_nonfinite_grad": False, "max_skipped_updates": None, **settings})
        train = SimpleNamespace(global_step=0, samples=0, skipped_updates=0, consecutive_skips=0)
        self.state = SimpleNamespace(train=train)
        self.precision = Precision(None, CPU)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.scheduler: Any = None
        self.ema: Any = None
        self.reduction = LocalReduction(self.optimizer, self.model.named_parameters)
        self.window, self.session = Window(LocalDomain(), CPU), TrainingSession()
        self.asked: list[str] = []
        self.update = UpdateStep(
            self,
            keys=own_keys(self.session),
            window=self.window,
            sync=StepSync(LocalDomain(), CPU),
            session=self.session,
            preparation=ModelPreparation(LocalDomain()),
            look=lambda: self.asked.append("look"),
            losses=Meters(),
            own_backward=own_backward,
        )

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.model

    @property
    def weight(self) -> float:
        return float(self.model.weight)

    def complete_gradients(self) -> None:
        self.asked.append("complete")
        self.reduction.complete()

    def unscale_gradients(self, totals: StepTotals) -> list[Tensor]:
        self.asked.append("unscale")
        return self.reduction.unscale(self.window.gradient_factor(totals.weight, 1), totals.weight)

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        self.asked.append("norm")
        return self.reduction.norm(gradients)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        self.asked.append("clip")

    def optimizer_step(self) -> None:
        self.asked.append("step")
        self.reduction.apply(self.state.train.global_step + 1)

    def zero_gradients(self) -> None:
        self.asked.append("zero")
        self.reduction.zero()

    def forward(self, value: float, weight: float = 1.0) -> None:
        """Make a micro-batch whose gradient is `value`."""
        self.window.begin_microbatch(weight, 2.0)
        self.window.scale(self.model(torch.tensor([[value]])).mean()).backward()

    def make(self, *values: float) -> UpdateOutcome:
        for value in values:
            self.forward(value)
        return self.update.make()


def test_the_hooks_are_asked_in_this_order_and_everything_advances() -> None:
    run = Run()
    outcome = run.make(1.0, 3.0)
    assert run.asked == ["complete", "unscale", "norm", "look", "clip", "step", "zero"]
    assert outcome.committed and outcome.weight == 2.0 and outcome.samples == 4.0 and outcome.loss == 2.0
    assert outcome.grad_norm is not None and float(outcome.grad_norm) == 2.0
    assert run.weight == 1.0 - 0.5 * 2.0 and run.model.weight.grad is None
    assert (run.state.train.global_step, run.state.train.samples) == (1, 4) and run.window.count == 0
    assert run.update.losses.averages() == {"loss": 2.0}
    run.make(1.0)
    assert run.asked.count("look") == 1  # at the first one of this process only


def test_a_schedule_by_updates_and_averages_follow_a_committed_update_only() -> None:
    run = Run(skip_nonfinite_grad=True)
    stepped: list[str] = []
    run.scheduler = SimpleNamespace(step=lambda: stepped.append("schedule"))
    run.ema = SimpleNamespace(update=lambda: stepped.append("average"))
    run.make(1.0)
    assert stepped == ["average"]  # the schedule goes by epochs until it is said otherwise
    run.update.steps_scheduler = True
    run.make(1.0)
    assert stepped == ["average", "schedule", "average"]
    skipped = run.make(float("nan"))
    assert skipped.reason == "nonfinite" and len(stepped) == 3
    run.scheduler = SimpleNamespace(step_update=lambda updates: stepped.append(f"to {updates}"))
    run.update.tells_place = True
    run.make(1.0)
    assert stepped[3:] == ["to 3", "average"]


def test_an_update_that_is_left_out_advances_nothing_but_the_samples() -> None:
    run = Run(skip_nonfinite_grad=True, max_skipped_updates=1)
    outcome = run.make(float("inf"))
    assert not outcome.committed and run.weight == 1.0 and run.model.weight.grad is None
    train = run.state.train
    assert (train.global_step, train.skipped_updates, train.samples) == (0, 1, 2) and run.window.count == 0
    assert not run.update.losses and "clip" not in run.asked and "look" not in run.asked
    with pytest.raises(NonFiniteError, match="at most 1 skipped updates in a row"):
        run.make(float("inf"))


def test_an_update_that_is_not_finite_ends_a_run_that_may_not_skip() -> None:
    run = Run()
    with pytest.raises(NonFiniteError, match=r"at step 1.*ranks \[0\].*'weight'"):
        run.make(float("nan"))
    assert run.state.train.global_step == 0 and run.weight == 1.0


def test_an_update_of_nothing_or_of_a_loss_that_nobody_weighed_is_refused() -> None:
    run = Run()
    with pytest.raises(ValueError, match="Expected a micro-batch"):
        run.update.make()
    run.window.begin_microbatch(1.0, 1.0)
    with pytest.raises(ValueError, match=r"call `self.backward\(loss\)` for every micro-batch. Received: 1 of 1"):
        run.update.make()
    own = Run(own_backward=True)
    own.window.begin_microbatch(1.0, 1.0)
    with pytest.raises(ValueError, match=r"Expected `backward` to leave a gradient"):
        own.update.make()


def test_what_was_asked_for_is_applied_and_an_update_that_was_taken_back_asks_again() -> None:
    run = Run()
    run.session.request("save")
    run.make(1.0)
    assert run.session.save_requested and run.session.local_requests() == frozenset()
    run.session.request("stop")
    run.reduction.agree = lambda totals, window, step: None  # type: ignore[assignment, method-assign]
    outcome = run.make(1.0)
    assert outcome.reason == "uncommitted" and run.session.stop_reason is None
    assert run.session.local_requests() == {"stop"} and run.state.train.global_step == 1


def test_learning_rates_are_kept_of_updates_that_are_logged() -> None:
    run = Run()
    run.update.log_every = 2
    run.make(1.0)
    assert run.update.rates == []
    run.make(1.0)
    assert run.update.rates == [0.5]


def test_samples_that_are_counted_on_a_device_are_read_when_they_are_asked_for() -> None:
    run = Run()
    run.update.sync.reduce = lambda **given: StepTotals(1.0, 2.0, torch.tensor(3.0), 0.0)  # type: ignore[method-assign]
    run.make(1.0)
    run.make(1.0)
    assert run.state.train.samples == 0
    run.update.raise_pending_error()
    assert run.state.train.samples == 6
    run.update.read_samples()  # there is nothing left
    assert run.state.train.samples == 6
