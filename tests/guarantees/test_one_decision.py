"""G7: what one rank sees is decided by all; of updates that are skipped, every stack is asked in `test_every_stack.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import TracingRunner, whole_settings
from torch import Tensor

from danling.training import NonFiniteError


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    more = {"steps": 6, "accum_steps": 1, "dataloader": {"batch_size": 2}, "log": False}
    return whole_settings(root, **{**more, "comm.init_timeout_seconds": 30, **changes})


class Poisoned(TracingRunner):
    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        is_last = self.rank == self.world_size - 1
        poisoned = self.mode == "train" and is_last and self.state.train.global_step > 0
        return super().compute_loss(pred, target) * (float("nan") if poisoned else 1.0)


def train_poisoned(config: dict[str, Any]) -> None:
    with Poisoned(config) as runner:
        runner.train()


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    config = settings(tmp_path, skip_nonfinite_grad=True, max_skipped_updates=2)
    outcomes = run_outcomes(train_poisoned, config, world_size=2)
    assert all(
        isinstance(outcome.error, NonFiniteError)
        and "2 skipped updates in a row" in str(outcome.error)
        for outcome in outcomes
    )


class AskingRunner(TracingRunner):
    not_saved = ("saved_at",)

    def __init__(self, config: dict[str, Any], what: str) -> None:
        super().__init__(config)
        self.what = what
        self.saved_at: list[int] = []

    def train_step(self, data: Any) -> Any:
        if self.rank == self.world_size - 1 and self.state.train.global_step == 2:
            self.stop() if self.what == "stop" else self.request_checkpoint()
        return super().train_step(data)

    def save_checkpoint(self, **options: Any) -> None:
        self.saved_at.append(self.state.train.global_step)
        super().save_checkpoint(**options)


def train_asking(config: dict[str, Any], what: str) -> list[int]:
    with AskingRunner(config, what) as runner:
        runner.train()
    assert (runner.workspace.checkpoints / "latest.pth").exists()
    return runner.saved_at


@pytest.mark.parametrize(("what", "saved_at"), [("stop", [3]), ("save", [3, 6])])
def test_request_of_one_rank_is_done_by_all(what: str, saved_at: list[int], tmp_path: Path) -> None:
    config = settings(tmp_path, evaluate_interval=100, **{"checkpoint.interval": 100})
    assert run_processes(train_asking, config, what, world_size=2) == [saved_at] * 2


class UnevenRunner(TracingRunner):
    def __init__(self, config: dict[str, Any], lengths: list[int]) -> None:
        super().__init__(config)
        batches = [
            {
                "input": torch.randn(2, 6),
                "target": torch.tensor([0, 1]),
                "index": torch.tensor([0, 1]),
            }
        ]
        self.dataloaders = {"train": batches * lengths[self.rank]}
        self.datasets = {"val": self.datasets["val"]}


def train_uneven(config: dict[str, Any], lengths: list[int]) -> int:
    with UnevenRunner(config, lengths) as runner:
        runner.train()
        return runner.state.train.global_step


def test_loader_ending_early_ends_the_pass_for_all(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=2, accum_steps=2)
    del config["steps"]
    config["scheduler"] = {"type": "constant"}
    # Windows of rank 0: 2, 2, 1. Windows of rank 1: 2, 1. The third has nothing on rank 1.
    assert run_processes(train_uneven, config, [5, 3], world_size=2) == [4, 4]


def test_an_empty_shard_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_outcomes(
        train_uneven, settings(tmp_path, scheduler={"type": "constant"}), [2, 0], world_size=2
    )
    assert all("at least one batch on every rank" in str(outcome.error) for outcome in outcomes)
