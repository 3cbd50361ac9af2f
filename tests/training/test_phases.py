"""Several optimizers in one `train_step`, against loops by hand: bitwise on one process, to 1e-12 in float64 over ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.nn.functional import softplus

import danling as dl
from danling.training import NonFiniteError
from danling.utils.tensors import whole


class GAN(nn.Module):
    """Two small networks; a batch norm, so that there are buffers."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        hidden = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.generator = nn.Sequential(nn.Linear(3, 8), hidden, nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def made(*, norm: bool = True) -> tuple[GAN, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(5)
    data = [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator))
        for _ in range(12)
    ]
    return GAN(norm=norm).double(), [(real.double(), noise.double()) for real, noise in data]


def optimizers(gan: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "discriminator": torch.optim.Adam(gan.discriminator.parameters(), lr=2e-2),
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=1e-2),
    }


def schedules(optimizer: Any) -> dict[str, Any]:
    return {
        "discriminator": torch.optim.lr_scheduler.StepLR(optimizer["discriminator"], 2, 0.5),
        "generator": torch.optim.lr_scheduler.ExponentialLR(optimizer["generator"], 0.9),
    }


class Run(dl.Runner):
    every = 1
    norm = True

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(
            {
                "log": False,
                "seed": 1,
                "dir": str(directory),
                "max_grad_norm": 0.5,
                "steps": 6,
                **settings,
            }
        )
        self.model, data = made(norm=self.norm)
        self.optimizer = optimizers(self.model)
        self.scheduler = schedules(self.optimizer)
        share = slice(self.rank, None, self.world_size)
        self.dataloaders = {"train": [tuple(part[share] for part in batch) for batch in data]}

    def train_step(self, data: Any) -> Any:
        real, noise = data
        gan = self.model
        with self.optimizing("discriminator"):
            fake = gan.generator(noise)
            self.backward(
                softplus(-gan.discriminator(real)).mean()
                + softplus(gan.discriminator(fake.detach())).mean()
            )
        with self.optimizing("generator", every=self.every) as due:
            if due:
                self.backward(softplus(-gan.discriminator(fake)).mean())
        return None, None


def by_hand(
    steps: int, *, accumulate: int = 1, every: int = 1, clip: float = 0.5, norm: bool = True
) -> GAN:
    """Train as people do: alternating updates, each with its norm."""
    gan, data = made(norm=norm)
    optimizer = optimizers(gan)
    schedule = schedules(optimizer)
    batches = iter(data)
    for step in range(1, steps + 1):
        kept: dict[str, list[Tensor]] = {}
        for micro in range(accumulate):
            real, noise = next(batches)
            fake = gan.generator(noise)
            losses = {
                "discriminator": lambda real=real, fake=fake: (
                    softplus(-gan.discriminator(real)).mean()
                    + softplus(gan.discriminator(fake.detach())).mean()
                ),
                "generator": lambda fake=fake: softplus(-gan.discriminator(fake)).mean(),
            }
            for name, loss in losses.items():
                if name == "generator" and step % every:
                    continue
                mine = [p for group in optimizer[name].param_groups for p in group["params"]]
                found = torch.autograd.grad(loss(), mine, retain_graph=name == "discriminator")
                kept[name] = (
                    [a + b for a, b in zip(kept[name], found)] if name in kept else list(found)
                )
                if micro == accumulate - 1:
                    for parameter, gradient in zip(mine, kept[name]):
                        parameter.grad = gradient / accumulate
                    nn.utils.clip_grad_norm_(mine, clip)
                    optimizer[name].step()
                    schedule[name].step()
                    optimizer[name].zero_grad()
    return gan


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "hand"),
    [
        ({}, {"steps": 6}),
        ({"steps": 4, "accum_steps": 2}, {"steps": 4, "accumulate": 2}),
        ({"every": 3}, {"steps": 6, "every": 3}),
    ],
    ids=["alternating", "accumulated", "every third"],
)
def test_phases_are_the_loop_by_hand_bit_for_bit(tmp_path: Path, settings: Any, hand: Any) -> None:
    settings = dict(settings)
    kind = type("Every", (Run,), {"every": settings.pop("every", 1)})
    with kind(tmp_path, **settings) as runner:
        runner.train()
        assert same(runner.model, by_hand(**hand))
        assert runner.train_state.global_step == hand["steps"]
        assert runner.train_state.samples == 6 * hand["steps"] * hand.get("accumulate", 1)
        rates = [group["lr"] for group in runner.optimizer.param_groups]
        assert rates[0] == 2e-2 * 0.5 ** (hand["steps"] // 2)
        assert all(parameter.grad is None for parameter in runner.model.parameters())


class Plain(Run):
    """Without a batch norm, which each rank computes for itself; killed where it is said."""

    norm = False
    killed_at: int | None = None

    def step(self) -> Any:
        if self.train_state.global_step == self.killed_at:
            self.checkpoint_manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def trained(
    directory: str, settings: dict[str, Any], killed_at: int | None = None
) -> tuple[dict[str, Tensor], Any]:
    """Train, and return whole weights and the state of the optimizers."""
    with Plain(Path(directory), **settings) as runner:
        runner.killed_at = killed_at
        runner.train()
        with runner.whole_weights():
            weights = {
                name: value.detach().clone()
                for name, value in runner.unwrapped_model.state_dict().items()
            }
        state = runner.optimizer_state_dict()["state"]
        return {name: whole(value).clone() for name, value in weights.items()}, {
            (name, key): whole(value).clone()
            for name, entry in state.items()
            for key, value in entry.items()
        }


FSDP = {"stack": "parallel", "parallel.axes.shard": 2}


@pytest.mark.parametrize("layout", [{}, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_make_the_updates_of_the_whole_batch(
    tmp_path: Path, layout: Any, accumulate: int
) -> None:
    settings = {**layout, "steps": 4, "accum_steps": accumulate}
    ranks = run_processes(trained, str(tmp_path / "run"), settings, world_size=2)
    expected = by_hand(4, accumulate=accumulate, norm=False).state_dict()
    for weights, state in ranks:
        assert all(
            torch.allclose(weights[name], expected[name], rtol=0, atol=1e-12) for name in expected
        )
        assert all(torch.equal(value, ranks[0][1][key]) for key, value in state.items())


@pytest.mark.parametrize(
    "layout", [{}, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp"]
)
def test_killed_run_resumes_bitwise(tmp_path: Path, layout: Any) -> None:
    settings = {**layout, "checkpoint.interval": 1, "auto_resume": True}
    whole_run = run_processes(trained, str(tmp_path / "whole"), settings, world_size=2)
    ends = run_outcomes(trained, str(tmp_path / "killed"), settings, 3, world_size=2)
    assert {end.exit_code for end in ends} == {-signal.SIGKILL}
    again = run_processes(trained, str(tmp_path / "killed"), settings, world_size=2)
    for (weights, state), (others, other_state) in zip(whole_run, again, strict=True):
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
        assert state.keys() == other_state.keys()
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())


def test_nonfinite_phase_is_skipped_alone_and_has_its_own_scale(tmp_path: Path) -> None:
    class Spoilt(Run):
        bad = range(0)

        def backward(self, loss: Tensor) -> None:
            spoilt = (
                self._parts.phases.current.name == "generator"
                and self.train_state.attempted in self.bad
            )
            super().backward(loss * float("nan") if spoilt else loss)

    with Spoilt(tmp_path / "skipped", skip_nonfinite_grad=True, max_skipped_updates=2) as runner:
        runner.bad = range(2, 4)
        runner.train()
        counts = [
            member.state[next(iter(member.state))]["step"].item()
            for member in runner.optimizer.optimizers
        ]
        assert (
            counts == [6, 4]
            and runner.train_state.global_step == 6
            and runner.train_state.skipped_updates == 0
        )
        assert (
            runner.scheduler["generator"].last_epoch == 4
            and runner.scheduler["discriminator"].last_epoch == 6
        )
        assert not any(value.isnan().any() for value in runner.model.state_dict().values())
    with (
        Spoilt(tmp_path / "too many", skip_nonfinite_grad=True, max_skipped_updates=1) as runner,
        pytest.raises(
            NonFiniteError, match="Received: 2 of the optimizer 'generator' before step 4"
        ),
    ):
        runner.bad = range(2, 4)
        runner.train()
    with Spoilt(tmp_path / "scaled", precision="fp16") as runner:
        runner.bad = range(1, 2)
        runner.train()
        scalers = {
            name: phase["scaler"] for name, phase in runner._parts.phases.state_dict().items()
        }
        assert scalers["generator"]["scale"] == scalers["discriminator"]["scale"] / 2
        saved = runner.state_dict()["state"]["phases"]
    with Spoilt(
        tmp_path / "again",
        precision="fp16",
        resume=str(tmp_path / "scaled" / "checkpoints/latest.pth"),
    ) as runner:
        assert runner._parts.phases.state_dict() == saved


def step_of(*calls: str) -> Any:
    """Return a `train_step` that makes these calls, whose letters are a block each: with a loss, nested, or outside of blocks."""

    def train_step(self: Any, data: Any) -> Any:
        def loss() -> Tensor:
            return self.model.discriminator(data[0]).mean()

        for call in calls:
            name, _, kind = call.partition(":")
            if not name:
                self.backward(loss())
                continue
            with self.optimizing(name, every=0 if kind == "never" else 1):
                if kind == "inner":
                    with self.optimizing("generator"):
                        self.backward(loss())
                elif kind == "other":
                    self.backward(self.model.generator(data[1]).sum())
                elif kind != "empty":
                    self.backward(loss())
        return None, None

    return train_step


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["critic"], r"one of discriminator, generator. Received: optimizing\('critic'\)"),
        (
            ["discriminator:empty"],
            r"block of optimizing\('discriminator'\) to call self.backward\(loss\)",
        ),
        (
            ["discriminator:inner"],
            r"optimizing\('generator'\) was called inside of optimizing\('discriminator'\)",
        ),
        (["discriminator", ""], r"backward\(loss\) was called outside of optimizing"),
        (["", "discriminator"], r"backward\(loss\) was called outside of optimizing"),
        (["discriminator:never"], "Expected every to be at least 1"),
        (
            ["discriminator:other"],
            r"optimizing\('discriminator'\) to depend on a parameter of that optimizer",
        ),
    ],
)
def test_slips_are_named(tmp_path: Path, calls: list[str], message: str) -> None:
    kind = type("Slip", (Run,), {"train_step": step_of(*calls)})
    with kind(tmp_path) as runner:
        with pytest.raises(ValueError, match=message):
            runner.train()
        assert runner.window is not None and runner._parts.phases.current is None


class Single(Run):
    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.optimizer, self.scheduler = torch.optim.SGD(self.model.parameters(), lr=0.1), None


def test_impossible_phases_are_refused(tmp_path: Path) -> None:
    with (
        Single(tmp_path / "single") as runner,
        pytest.raises(ValueError, match="Expected optimizers by name"),
    ):
        runner.train()
    outside = pytest.raises(ValueError, match="was called outside of train_step")
    with Run(tmp_path / "outside") as runner, outside, runner.optimizing("generator"):
        pass
    for name, settings in {
        "audit.replay_interval": {"audit.replay_interval": 1, "deterministic": True},
        "stack='accelerate'": {"stack": "accelerate"},
    }.items():
        with pytest.raises(ValueError, match=f"for optimizers by name. Received: {name}"):
            Run(tmp_path / name, **settings)


@pytest.mark.parametrize("named", [True, False])
def test_a_step_of_the_optimizer_in_a_train_step_is_refused(tmp_path: Path, named: bool) -> None:
    class Stepped(Run if named else Single):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            (self.optimizer["generator"] if named else self.optimizer).step()
            return None, None

    with (
        Stepped(tmp_path) as runner,
        pytest.raises(RuntimeError, match=r"a step of (Adam|SGD) inside of it. Remove opt"),
    ):
        runner.train()


class Cycles(Run):
    """One schedule has as many steps as `every` leaves it; the other one is too short."""

    every = 2
    norm = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        self.scheduler = {
            "discriminator": one_cycle(self.optimizer["discriminator"], 0.1, 4),
            "generator": one_cycle(self.optimizer["generator"], 0.1, 3),
        }


def test_cycle_of_one_optimizer_that_is_too_short_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cycles(tmp_path) as run, pytest.raises(ValueError, match="Tried to step 5 times"):
        run.train()
    (line,) = [each for each in caplog.messages if "total_steps" in each]
    assert "'discriminator'" in line and "with total_steps=6" in line


class ByFunction(Run):
    """Its schedules are functions, and it notes its rates."""

    not_saved = ("rates",)
    norm = False

    def __init__(self, directory: Path, base: float, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.scheduler = {
            name: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: base**step)
            for name, optimizer in self.optimizer.items()
        }
        self.rates: list[tuple[float, ...]] = []

    def train_step(self, data: Any) -> Any:
        self.rates.append(tuple(group["lr"] for group in self.optimizer.param_groups))
        return super().train_step(data)


def test_schedule_of_one_optimizer_that_is_left_out_begins_with_its_own_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ByFunction(tmp_path / "first", 0.5, steps=3) as run:
        run.train()
    caplog.set_level("INFO", logger="danling")
    resume: dict[str, Any] = {"resume": str(tmp_path / "first/checkpoints/latest.pth")}
    resume["checkpoint"] = {"exclude_from_loading": ["scheduler.generator"]}
    with ByFunction(tmp_path / "second", 0.9, **resume) as run:
        run.train()
    # The rate of the save is that of the first update; the function is the program's.
    of_discriminator = [2e-2 * 0.5**3, 2e-2 * 0.9**4, 2e-2 * 0.9**5]
    of_generator = [1e-2, 1e-2 * 0.9, 1e-2 * 0.9**2]
    for found, expected in zip(zip(*run.rates), (of_discriminator, of_generator)):
        assert found == pytest.approx(expected)
    # At INFO, since the run is longer too.
    (line,) = [each for each in caplog.messages if "The function of the schedule" in each]
    assert "LambdaLR at 3: 0.01458 (before 0.0025)." in line
