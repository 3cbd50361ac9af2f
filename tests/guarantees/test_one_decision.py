"""G7 and G8: what one rank sees is decided by all, and an update that is not made advances nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import ProcessFailure, run_outcomes, run_processes
from support.toys import TracingRunner, differences, whole_state
from torch import Tensor

from danling.training import NonFiniteError


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "steps": 6,
        "seed": 3,
        "ema": {"enabled": True, "decay": 0.9},
        "dataloader": {"batch_size": 2},
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine"},
        "workspace_root": str(root),
        "log": False,
        "comm.init_timeout_seconds": 30,
    }
    return {**base, **changes}


class PoisonedRunner(TracingRunner):
    """Sees a loss that is not finite on the last rank at one attempt at an update.

    Args:
        config: The configuration.
        attempts: Numbers of the attempts, from 0.
    """

    not_saved = ("changed", "seen")

    def __init__(self, config: dict[str, Any], attempts: tuple[int, ...]) -> None:
        super().__init__(config)
        self.attempts = attempts
        self.seen: list[tuple[bool, str | None]] = []
        self.before: dict[str, Any] = {}
        self.changed: list[str] = []

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Poison the loss of the last rank."""
        loss = super().compute_loss(pred, target)
        poisoned = self.mode == "train" and len(self.seen) in self.attempts and self.rank == self.world_size - 1
        return loss * float("nan") if poisoned else loss

    def parts(self) -> dict[str, Any]:
        """What must not move."""
        state = whole_state(self)
        moving = ("rng", "train")
        state["state"] = {key: value for key, value in state["state"].items() if key not in moving}
        state.pop("dataloaders")
        return {"step": self.state.train.global_step, **torch.utils._pytree.tree_map(clone, state)}

    def step(self) -> Any:
        """Compare what an update moved."""
        before = self.parts()
        outcome = super().step()
        self.seen.append((outcome.committed, outcome.reason))
        if not outcome.committed:
            self.changed += differences(self.parts(), before)
        return outcome


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def train_poisoned(config: dict[str, Any], attempts: tuple[int, ...]) -> dict[str, Any]:
    with PoisonedRunner(config, attempts) as runner:
        runner.train()
        train = runner.state.train
        return {
            "seen": runner.seen,
            "changed": runner.changed,
            "skipped": train.skipped_updates,
            "step": train.global_step,
        }


def test_a_skipped_update_advances_nothing(tmp_path: Path) -> None:
    """On one process; on two, every stack is asked in `test_every_stack.py`."""
    (alone,) = run_processes(train_poisoned, settings(tmp_path, skip_nonfinite_grad=True), (2, 3), world_size=1)
    assert alone["seen"] == [(True, None)] * 2 + [(False, "nonfinite")] * 2 + [(True, None)] * 4
    assert alone["changed"] == []
    assert (alone["step"], alone["skipped"]) == (6, 2)


def test_off_it_raises_on_all_ranks_and_names_step_and_rank(tmp_path: Path) -> None:
    outcomes = run_outcomes(train_poisoned, settings(tmp_path), (2,), world_size=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, NonFiniteError)
        assert "step 3" in str(outcome.error) and "ranks [1]" in str(outcome.error) and "0.weight" in str(outcome.error)


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    config = settings(tmp_path, skip_nonfinite_grad=True, max_skipped_updates=2)
    outcomes = run_outcomes(train_poisoned, config, (1, 2, 3, 4), world_size=2)
    assert all(
        isinstance(outcome.error, NonFiniteError) and "2 skipped updates in a row" in str(outcome.error)
        for outcome in outcomes
    )


class AskingRunner(TracingRunner):
    """Asks for something on the last rank only, during the third update."""

    def __init__(self, config: dict[str, Any], what: str) -> None:
        super().__init__(config)
        self.what = what

    def train_step(self, data: Any) -> Any:
        """Ask, then train."""
        if self.rank == self.world_size - 1 and self.state.train.global_step == 2:
            if self.what == "stop":
                self.stop()
            elif self.what == "save":
                self.request_checkpoint()
            else:
                os.kill(os.getpid(), getattr(signal, self.what))
        return super().train_step(data)


def train_asking(config: dict[str, Any], what: str) -> tuple[int, Any, list[str]]:
    code = None
    runner = AskingRunner(config, what)
    with runner:
        try:
            runner.train()
        except SystemExit as error:
            code = error.code
    saved = sorted(path.name for path in runner.workspace.checkpoints.glob("*.pth"))
    return runner.state.train.global_step, code, saved


@pytest.mark.parametrize(
    ("what", "code"),
    [("stop", None), ("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130)],
    ids=lambda value: str(value),
)
def test_what_one_rank_asks_all_do(what: str, code: int | None, tmp_path: Path) -> None:
    ranks = run_processes(train_asking, settings(tmp_path, **{"checkpoint.interval": 100}), what, world_size=2)
    assert [(step, left) for step, left, _ in ranks] == [(3, code)] * 2
    assert ranks[0][2] == ["latest.pth"]


def test_a_save_that_one_rank_asks_for(tmp_path: Path) -> None:
    ranks = run_processes(train_asking, settings(tmp_path, **{"checkpoint.interval": 100}), "save", world_size=2)
    assert [step for step, _, _ in ranks] == [6, 6]


def train_failing(config: dict[str, Any]) -> None:
    class Failing(TracingRunner):
        def train_step(self, data: Any) -> Any:
            if self.rank == 1 and self.state.train.global_step == 2:
                raise LookupError("mine")
            return super().train_step(data)

    with Failing(config) as runner:
        runner.train()


def test_an_error_on_one_rank_ends_the_other_within_seconds(tmp_path: Path) -> None:
    outcomes = run_outcomes(train_failing, settings(tmp_path), world_size=2, timeout=20)
    first, second = sorted(outcomes, key=lambda outcome: outcome.rank)
    assert isinstance(second.error, LookupError) and "mine" in str(second.error)
    assert first.error is not None and not isinstance(first.error, ProcessFailure), first.error


class UnevenRunner(TracingRunner):
    """Has loaders of its own, of another length on each rank."""

    def __init__(self, config: dict[str, Any], lengths: list[int]) -> None:
        super().__init__(config)
        batches = [{"input": torch.randn(2, 6), "target": torch.tensor([0, 1]), "index": torch.tensor([0, 1])}]
        self.dataloaders = {"train": batches * lengths[self.rank]}
        self.datasets = {"val": self.datasets["val"]}


def train_uneven(config: dict[str, Any], lengths: list[int]) -> int:
    with UnevenRunner(config, lengths) as runner:
        runner.train()
        return runner.state.train.global_step


def test_a_loader_that_ends_early_ends_the_pass_for_all(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=2, accum_steps=2)
    del config["steps"]
    config["scheduler"] = {"type": "constant"}
    # Windows of rank 0: 2, 2, 1. Windows of rank 1: 2, 1. The third has nothing on rank 1.
    assert run_processes(train_uneven, config, [5, 3], world_size=2) == [4, 4]


def test_an_empty_shard_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_outcomes(train_uneven, settings(tmp_path, scheduler={"type": "constant"}), [2, 0], world_size=2)
    assert all("at least one batch on every rank" in str(outcome.error) for outcome in outcomes)
