"""Datasets that a program replaces or extends between two passes are taken in; a change within a pass is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl


class Points(Dataset[Tensor]):
    def __init__(self, first: int, length: int) -> None:
        self.numbers = list(range(first, first + length))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.numbers[index])])


class Growing(dl.TorchRunner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.datasets = {"train": Points(0, 8), "val": Points(100, 2)}
        self.model = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def change(self, *, within: bool) -> None:
        how, when = self.config["case.how"], self.config["case.when"]
        if when != ("within" if within else "between") or not self.state.train.global_step:
            return
        more = 4 if how != "uneven" or self.rank == 0 else 6
        if how == "replaced":
            self.datasets["train"] = Points(20, 12)
        else:
            self.datasets["train"].numbers += range(8, 8 + more)
        self.datasets["val"].numbers += [102]

    def train_epoch(self, split: str = "train") -> Any:
        self.change(within=False)
        self.seen.append([])
        return super().train_epoch(split)

    def train_step(self, data: Tensor) -> Any:
        self.change(within=True)
        self.seen[-1] += data.flatten().int().tolist()
        with self.train_context():
            loss = self.model(data / 100).mean()
            self.backward(loss)
        return None, loss

    def evaluate_step(self, data: Tensor) -> Any:
        self.evaluated = [*getattr(self, "evaluated", []), *data.flatten().int().tolist()]
        return None, self.model(data).mean()


def train(
    root: str, how: str, when: str, epochs: int = 2, resume: bool = False
) -> tuple[list[list[int]], int, list[int]]:
    more = {
        "epochs": epochs,
        "auto_resume": resume,
        "try_evaluation": False,
        "dataloader": {"batch_size": 2},
    }
    config = settings(root, **more, case={"how": how, "when": when})
    with Growing(config) as runner:
        runner.train()
        return runner.seen, runner.state.train.global_step, getattr(runner, "evaluated", [])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("how", "second"), [("replaced", range(20, 32)), ("extended", range(12))])
def test_a_change_between_two_passes_is_taken_in(
    how: str, second: range, world_size: int, tmp_path: Path
) -> None:
    ranks = run_processes(train, str(tmp_path), how, "between", world_size=world_size)
    passes = [sorted(number for seen, _, _ in ranks for number in seen[epoch]) for epoch in (0, 1)]
    assert passes == [list(range(8)), list(second)]
    assert [steps for _, steps, _ in ranks] == [(8 + 12) // (2 * world_size)] * world_size
    evaluated = sorted({number for *_, each in ranks for number in each})
    assert evaluated == [100, 101, 102]


@pytest.mark.parametrize(
    ("how", "when", "message"),
    [
        (
            "replaced",
            "within",
            r"split 'train' to stay as it is within a pass\. Received: another dataset",
        ),
        (
            "extended",
            "within",
            r"split 'train' to stay as it is within a pass\. Received: a dataset of length 12 that had 8",
        ),
        (
            "uneven",
            "between",
            r"to have one length on all ranks, over which.* Received: \[12, 14\] by rank",
        ),
    ],
)
def test_other_changes_are_refused_on_all_ranks(
    how: str, when: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_processes(train, str(tmp_path), how, when, world_size=2)


def test_run_continues_with_a_dataset_grown_between_two_passes(tmp_path: Path) -> None:
    run_processes(train, str(tmp_path), "extended", "between", 1, world_size=1)
    ((seen, steps, _),) = run_processes(
        train, str(tmp_path), "extended", "between", 2, True, world_size=1
    )
    assert sorted(seen[-1]) == list(range(12)) and steps == 4 + 6
