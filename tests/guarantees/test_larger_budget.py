"""A larger budget in the same process is a resume with it: schedule, warm-up, intervals and weights are those of the resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.processes import run_processes
from support.toys import Line, settings, whole_state
from torch.optim import lr_scheduler as schedules

import danling as dl

SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"type": "cosine", "warmup_steps": 0.25},
    "linear": {"type": "linear", "final_lr_ratio": 0.1},
    "wsd": {"type": "wsd", "warmup_steps": 1, "decay_steps": 0.5},
    "constant": {"type": "constant", "warmup_steps": 0.5},
    "onecyclelr": {"type": "onecyclelr", "max_lr": 0.2},
    "steplr": {"type": "steplr", "step_size": 3},
    "cosine by epoch": {"type": "cosine", "interval": "epoch"},
}
EPOCHS = {"epochs": 1}, {"epochs": 3}
STEPS = {"steps": 4}, {"steps": 10}
CASES = [
    (name, budgets)
    for name in SCHEDULES
    for budgets in (EPOCHS, STEPS)
    if (name, budgets) != ("cosine by epoch", STEPS)
]


class Noting(Line):
    not_saved = ("rates",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rates: list[float] = []

    def step(self) -> Any:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return super().step()


def in_one_process(root: Path, before: dict[str, int], after: dict[str, int], **given: Any) -> Any:
    with Noting(settings(root, **before, **given)) as runner:
        runner.train()
        for key, value in after.items():
            runner.config[key] = value
        runner.train()
        return runner.rates, whole_state(runner), dict(runner.results)


def by_resume(root: Path, before: dict[str, int], after: dict[str, int], **given: Any) -> Any:
    rates = []
    for budget in (before, after):
        with Noting(settings(root, **budget, **given, auto_resume=True)) as runner:
            runner.train()
            rates += runner.rates
            found = whole_state(runner), dict(runner.results)
    return rates, *found


def check_equal(one: Any, other: Any) -> None:
    (rates, state, results), (resumed_rates, resumed_state, resumed_results) = one, other
    assert rates == pytest.approx(resumed_rates, abs=0) and results == resumed_results
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, resumed_state["model"][name]), name
    assert state["scheduler"] == resumed_state["scheduler"]
    assert state["optimizer"]["param_groups"] == resumed_state["optimizer"]["param_groups"]


@pytest.mark.parametrize(("schedule", "budgets"), CASES)
def test_a_larger_budget_is_a_resume_with_it(
    schedule: str, budgets: tuple[dict[str, int], dict[str, int]], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "scheduler": SCHEDULES[schedule],
        "ema": {"enabled": True, "decay": 0.9},
    }
    given["optim"] = {"type": "adamw", "lr": 0.1}
    one = in_one_process(tmp_path / "one", *budgets, **given)
    check_equal(one, by_resume(tmp_path / "two", *budgets, **given))
    assert one[0][-1] != one[0][4] or schedule == "constant"


def test_rate_follows_the_formula(tmp_path: Path) -> None:
    rates, _, _ = in_one_process(tmp_path, {"steps": 4}, {"steps": 8}, scheduler={"type": "cosine"})
    expected = [
        0.05 * (1 + math.cos(math.pi * step / total))
        for step, total in zip(range(8), [4] * 4 + [8] * 4)
    ]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    "stack", ["accelerate", "parallel", pytest.param("graph", marks=pytest.mark.slow)]
)
def test_on_other_stacks_too(stack: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"stack": stack, "scheduler": {"type": "cosine"}, "accum_steps": 2}
    one = in_one_process(tmp_path / "one", {"steps": 2}, {"steps": 5}, **given)
    check_equal(one, by_resume(tmp_path / "two", {"steps": 2}, {"steps": 5}, **given))


def on_ranks(root: str) -> tuple[list[float], list[float]]:
    rates, state, _ = in_one_process(
        Path(root), {"epochs": 1}, {"epochs": 2}, scheduler={"type": "cosine"}
    )
    return rates, [float(tensor.sum()) for tensor in state["model"].values()]


def resumed_on_ranks(root: str) -> tuple[list[float], list[float]]:
    rates, state, _ = by_resume(
        Path(root), {"epochs": 1}, {"epochs": 2}, scheduler={"type": "cosine"}
    )
    return rates, [float(tensor.sum()) for tensor in state["model"].values()]


def test_on_two_ranks(tmp_path: Path) -> None:
    assert run_processes(on_ranks, str(tmp_path / "a")) == run_processes(
        resumed_on_ranks, str(tmp_path / "b")
    )


def grown_by_one(root: str) -> None:
    with Line(settings(root, epochs=1)) as runner:
        runner.train()
        if runner.is_main_process:
            runner.config.epochs = 2
        with pytest.raises(ValueError, match=r"epochs: 2 \(rank 0\), 1 \(rank 1\)"):
            runner.train()


def test_budget_changed_on_one_rank_is_refused(tmp_path: Path) -> None:
    run_processes(grown_by_one, str(tmp_path))


def test_budget_growing_during_training_moves_schedule_and_intervals(tmp_path: Path) -> None:
    class Growing(Noting):
        def step(self) -> Any:
            if self.state.train.global_step == 3:
                self.config.steps = 40
            return super().step()

    with Growing(settings(tmp_path, steps=4, scheduler={"type": "linear"})) as runner:
        runner.train()
        expected = [0.1 * (1 - step / total) for step, total in zip(range(40), [4] * 3 + [40] * 37)]
        assert runner.rates[:3] + runner.rates[4:] == pytest.approx(expected[:3] + expected[4:])
        history = sorted(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*.pth"))
    assert history == [f"ckpt-s{step:012d}.pth" for step in (1, 2, 3, *range(4, 41, 2))]


def test_files_of_the_run_have_the_new_budget(tmp_path: Path) -> None:
    with Line(settings(tmp_path, epochs=1)) as runner:
        runner.train()
        runner.config.epochs = 2
        runner.train()
        assert runner.read_checkpoint("latest")["runner"]["epochs"] == 2
    assert yaml.safe_load((tmp_path / "metadata" / "config.full.yaml").read_text())["epochs"] == 2


def test_a_schedule_of_the_program_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Noting):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(
                self.optimizer, 1.0, 0.0, total_iters=4
            )

    with Own(settings(tmp_path, epochs=1)) as runner:
        runner.train()
        runner.config.epochs = 2
        assert "keeps its length. Return it from `build_scheduler`" in caplog.text


def test_unit_of_the_budget_stays(tmp_path: Path) -> None:
    with Line(settings(tmp_path, epochs=1)) as runner:
        with pytest.raises(ValueError, match="steps or epochs, not both"):
            runner.config.steps = 4
        runner.train()
        with pytest.raises(
            ValueError, match="budget of epochs, in which this run has counted its 4 updates"
        ):
            runner.config.epochs = None
        assert runner.config.epochs == 1


def test_a_budget_may_be_set_after_construction(tmp_path: Path) -> None:
    with Line(settings(tmp_path, scheduler={"type": "constant"})) as runner:
        runner.config.epochs = 2
        runner.train()
        assert (
            runner.state.train.epoch == 2
            and (tmp_path / "checkpoints" / "ckpt-e000002.pth").exists()
        )
    assert isinstance(runner, dl.TorchRunner)


class OwnCycle(Noting):
    """Sets torch's schedule, whose length is in its state."""

    length: int | None = None
    interval = "steps"

    def build_scheduler(self) -> Any:
        length = self.length or getattr(self, self.interval)
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, length)


class ByEpoch(OwnCycle):
    interval = "epochs"


class TooShort(OwnCycle):
    length = 5


@pytest.mark.parametrize(
    ("kind", "budget", "interval"),
    [
        (OwnCycle, {"epochs": 2}, "step"),
        (OwnCycle, {"steps": 6}, "step"),
        (ByEpoch, {"epochs": 3}, "epoch"),
    ],
)
def test_a_cycle_of_torch_that_ends_before_the_run_is_refused_before_an_update(
    kind: type[OwnCycle], budget: dict[str, int], interval: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"scheduler": {"interval": interval}, "auto_resume": True}
    with kind(settings(tmp_path, **budget, **given)) as runner:
        runner.train()  # the cycle may end with the run
    longer = {key: value + 1 for key, value in budget.items()}
    with kind(settings(tmp_path, **longer, **given)) as runner:
        with pytest.raises(ValueError, match="Expected a OneCycleLR that is as long as the run"):
            runner.train()
        assert not runner.rates


def _sequence(optimizer: Any, length: int) -> Any:
    parts: list[Any] = [
        schedules.LinearLR(optimizer, 0.5, total_iters=2),
        schedules.OneCycleLR(optimizer, 0.2, length),
        schedules.ExponentialLR(optimizer, 0.9),
    ]
    return schedules.SequentialLR(optimizer, parts, [2, 6])


def _last_of_sequence(optimizer: Any, length: int) -> Any:
    parts: list[Any] = [
        schedules.LinearLR(optimizer, 0.5, total_iters=2),
        schedules.OneCycleLR(optimizer, 0.2, length),
    ]
    return schedules.SequentialLR(optimizer, parts, [2])


def _chain(optimizer: Any, length: int) -> Any:
    parts: list[Any] = [
        schedules.ExponentialLR(optimizer, 0.9),
        schedules.OneCycleLR(optimizer, 0.2, length),
    ]
    return schedules.ChainedScheduler(parts)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("make", [_sequence, _last_of_sequence, _chain])
def test_a_cycle_within_a_schedule_is_refused_where_torch_would_raise(
    make: Any, interval: str, tmp_path: Path
) -> None:
    class Within(Noting):
        length = 0

        def build_scheduler(self) -> Any:
            return make(self.optimizer, self.length)

    advances = 8
    budget = {"steps": advances} if interval == "step" else {"epochs": advances}
    given: dict[str, Any] = {"scheduler": {"interval": interval}}
    enough = next(length for length in range(2, 99) if _lasts(make, length, advances))
    Within.length = enough
    with Within(settings(tmp_path / "enough", **budget, **given)) as runner:
        runner.train()
    Within.length = enough - 1
    with Within(settings(tmp_path / "less", **budget, **given)) as runner:
        with pytest.raises(ValueError, match="that is as long as its part of the run"):
            runner.train()
        assert not runner.rates


def _lasts(make: Any, length: int, advances: int) -> bool:
    """Whether torch advances a schedule so often without an error."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = make(optimizer, length)
    try:
        for _ in range(advances):
            optimizer.step()
            scheduler.step()
    except ValueError:
        return False
    return True


class Holding(torch.optim.lr_scheduler.OneCycleLR):
    """Stays at the last rate after the end of the cycle."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.total_steps:
            super().step(epoch)


class Held(OwnCycle):
    def build_scheduler(self) -> Any:
        return Holding(self.optimizer, 0.2, 5)


def test_a_cycle_that_goes_on_after_its_end_may_be_shorter_than_the_run(tmp_path: Path) -> None:
    with Held(settings(tmp_path, steps=8)) as runner:
        runner.train()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 5)
    rates = []
    for step in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 5:
            scheduler.step()
    assert runner.rates == rates


def test_a_cycle_that_is_too_short_from_the_beginning_is_refused(tmp_path: Path) -> None:
    with TooShort(settings(tmp_path, steps=6)) as runner:
        with pytest.raises(ValueError, match="total_steps=5 for the 0 made and 6 to come"):
            runner.train()
        assert not runner.rates
    with TooShort(settings(tmp_path, steps=5)) as runner:
        runner.train()
        assert len(runner.rates) == 5
