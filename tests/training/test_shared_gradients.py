"""Ranks that hold copies of a model and do not share its gradient end the run, all of them, with the cause in the message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.distributed import ReplicaDriftError


class Points(dl.Runner):
    def __init__(self, config: dict[str, Any], around: str = "") -> None:
        super().__init__(config)
        self.around = around
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(32, 4, generator=generator)
        self.datasets = {"train": TensorDataset(inputs, (inputs.sum(1) > 0).long())}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        inputs, target = data
        if not self.around or self.state.train.global_step + 1 < int(
            self.config.get("from_step", 1)
        ):
            return super().train_step(data)
        model: Any = self.unwrapped_model if self.around == "unwrapped" else self.model.module
        pred = model(inputs)
        loss = self.criterion(pred, target)
        self.backward(loss)
        return pred, loss


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    base = {"seed": 1, "steps": 6, "dir": str(root), "checkpoint.interval": 4, "log": False}
    return {**base, "dataloader": {"batch_size": 2}, "optim": {"type": "sgd", "lr": 0.1}, **changes}


def train(config: dict[str, Any], around: str = "") -> tuple[Tensor, int]:
    """Return the weights, and how many updates were made."""
    with Points(config, around) as runner:
        runner.train()
        return torch.cat(
            [p.detach().flatten() for p in runner.model.parameters()]
        ), runner.state.train.global_step


@pytest.mark.parametrize(
    ("around", "changes", "update"),
    [
        ("unwrapped", {}, 1),
        ("module", {"from_step": 3}, 3),
        ("module", {"steps": 1}, 1),
        ("unwrapped", {"accum_steps": 2, "max_grad_norm": 0.1}, 1),
        ("unwrapped", {"stack": "accelerate"}, 1),
        ("unwrapped", {"skip_nonfinite_grad": True, "checkpoint.load_only": True, "steps": 1}, 1),
    ],
    ids=["unwrapped", "later", "last-update", "accumulated", "accelerate", "never-saved"],
)
def test_a_forward_around_the_wrapper_ends_all_ranks(
    around: str, changes: dict[str, Any], update: int, tmp_path: Path
) -> None:
    for outcome in run_outcomes(train, settings(tmp_path, **changes), around, world_size=2):
        assert isinstance(outcome.error, ReplicaDriftError), outcome.traceback
        text = str(outcome.error)
        assert (
            f"in update {update}: gradients of norm " in text and "self.unwrapped_model(x)" in text
        )
        assert " on rank 0, " in text and " on rank 1. " in text
    assert not list((tmp_path / "checkpoints").glob("ckpt-*0006*"))


def test_nothing_is_saved_of_diverged_ranks(tmp_path: Path) -> None:
    config = settings(tmp_path, **{"checkpoint.interval": 1, "from_step": 2})
    outcomes = run_outcomes(train, config, "unwrapped", world_size=2)
    assert all(isinstance(outcome.error, ReplicaDriftError) for outcome in outcomes)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*.pth"))
    assert saved == ["ckpt-s000000000001.pth"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "max_grad_norm": 0.01},
        {"precision": "fp16", "accum_steps": 2},
        {"audit.digest_interval": 2},
        {"stack": "parallel", "parallel.axes.replicate": 2, "fsdp.enabled": True},
    ],
    ids=["plain", "bf16", "fp16", "digests", "replicate"],
)
def test_ranks_with_shared_gradients_pass(changes: dict[str, Any], tmp_path: Path) -> None:
    assert [
        steps for _, steps in run_processes(train, settings(tmp_path, **changes), world_size=2)
    ] == [6, 6]


def test_intended_differences_of_ranks_are_allowed(tmp_path: Path) -> None:
    config = settings(tmp_path, **{"audit.gradient_spread": None})
    (first, _), (second, _) = run_processes(train, config, "unwrapped", world_size=2)
    assert not torch.equal(first, second)


class Holed(Points):
    """Every third update has no finite gradient on one rank, and another one has no targets."""

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        inputs, target = data
        attempt = self.state.train.micro_step
        if attempt % 3 == 1 and self.rank == 1:
            inputs = inputs * float("nan")
        return super().train_step((inputs, target))

    def batch_weight(self, data: Any, target: Any) -> float:
        return 0.0 if self.state.train.micro_step % 3 == 2 else 2.0


def train_holed(config: dict[str, Any]) -> tuple[int, int]:
    with Holed(config) as runner:
        runner.train()
        return runner.state.train.global_step, runner.state.train.skipped_updates


def test_skipped_and_weightless_updates_are_not_compared(tmp_path: Path) -> None:
    config = settings(tmp_path, skip_nonfinite_grad=True)
    assert run_processes(train_holed, config, world_size=2) == [(6, 10)] * 2


class Passes(Points):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)


def passes(config: dict[str, Any]) -> tuple[float, int, Tensor]:
    with Passes(config) as runner:
        runner.train()
        weights = torch.cat([p.detach().flatten() for p in runner.unwrapped_model.parameters()])
        return runner.optimizer.param_groups[0]["lr"], runner.state.train.epoch, weights


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 16), (2, 8), (1, 10)])
def test_pass_ending_at_the_budget_is_counted(
    world_size: int, batch_size: int, tmp_path: Path
) -> None:
    config = settings(
        tmp_path,
        **{"steps": 4, "dataloader.batch_size": batch_size, "scheduler": {"interval": "epoch"}},
    )
    rounds = 4 // (32 // (batch_size * world_size))  # the last, smaller batch is dropped
    for rate, epoch, _ in run_processes(passes, config, world_size=world_size):
        assert (rate, epoch) == (0.5**rounds, rounds)
