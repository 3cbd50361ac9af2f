"""LightningDataModule: prepared and set up as Lightning does it, divided over processes and resumed exactly.

Library: pytorch-lightning
Works: a `LightningDataModule` by `dl.data.from_datamodule`, with loaders of torch in any form
Exact: each sample once a pass on any number of processes, in evaluation too; resume
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.seen import Seeing, seen
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import danling as dl

lightning = pytest.importorskip("pytorch_lightning")

NUMBER = 21


def numbers(begin: int, number: int) -> TensorDataset:
    return TensorDataset(
        torch.arange(begin, begin + number).float()[:, None], torch.ones(number, 1)
    )


def doubled(samples: list[Any]) -> tuple[Tensor, ...]:
    inputs, targets = map(torch.stack, zip(*samples))
    return inputs * 2, targets


class Numbers(lightning.LightningDataModule):
    def __init__(
        self, root: Path | str, *, per_node: bool = True, sampler: bool = False, fails: bool = False
    ) -> None:
        super().__init__()
        self.root, self.sampler, self.fails = Path(root), sampler, fails
        self.prepare_data_per_node = per_node
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        if self.fails:
            raise OSError("no data")
        (self.root / f"prepared-{os.environ.get('RANK', 0)}").touch()

    def setup(self, stage: str) -> None:
        assert any(self.root.glob("prepared-*"))
        self.calls.append(stage)
        if stage == "fit":
            self.train, self.val = numbers(0, NUMBER), [numbers(100, 7), numbers(200, 5)]
        else:
            self.test = numbers(300, 4)

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * NUMBER, NUMBER) if self.sampler else None
        return DataLoader(
            self.train,
            batch_size=4,
            shuffle=sampler is None,
            sampler=sampler,
            collate_fn=doubled,
            drop_last=False,
        )

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(part, batch_size=2) for part in self.val]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=3)


class Training(Seeing):
    not_saved = ("evaluated",)

    def __init__(
        self,
        config: dict[str, Any],
        root: Path | str,
        kind: type[Numbers] = Numbers,
        **options: Any,
    ) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.datamodule = kind(root, **options)
        self.datasets = dl.data.from_datamodule(self.datamodule)
        self.evaluated: list[float] = []

    def values(self, data: Any) -> list[float]:
        return data[0].flatten().tolist()

    def evaluate_step(self, data: Any) -> Any:
        self.evaluated += data[0].flatten().tolist()
        return super().evaluate_step(data)


def settings(root: Path | str, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "epochs": 2,
        "seed": 1,
        "dir": f"{root}/run",
        "log": False,
        "auto_resume": True,
    }
    return {**config, "optim": {"type": "sgd", "lr": 1e-6}, **more}


def test_the_loaders_of_a_data_module_are_taken_over(tmp_path: Path) -> None:
    with Training(settings(tmp_path), tmp_path) as runner:
        assert runner.datamodule.calls == ["fit", "test"]
        assert (runner.train_splits, runner.evaluate_splits) == (
            ["train"],
            ["val_0", "val_1", "test"],
        )
        runner.train()
        assert Counter(runner.seen) == {2.0 * number: 2 for number in range(NUMBER)}
        assert runner.seen[:NUMBER] != runner.seen[NUMBER:]
        assert (
            runner.train_state.global_step == 12
        )  # a ragged last batch each, as the data module wants it
        runner.evaluated.clear()
        runner.evaluate("test")
        assert runner.evaluated == [300.0, 301.0, 302.0, 303.0]


@pytest.mark.parametrize("sampler", [False, True])
def test_samples_are_those_of_the_uninterrupted_run(sampler: bool, tmp_path: Path) -> None:
    def read(name: str, stop: int | None = None) -> list[float]:
        return seen(
            partial(Training, root=tmp_path, sampler=sampler), tmp_path / name, stop=stop, epochs=2
        )

    whole = read("whole")
    assert [*read("parts", 8), *read("parts")] == whole and len(whole) == 2 * NUMBER


@pytest.mark.parametrize(
    ("sampler", "drop_last"), [(RandomSampler, False), (SequentialSampler, True)]
)
def test_a_batch_sampler_of_torch_says_the_order_and_the_size(
    sampler: Any, drop_last: bool, tmp_path: Path
) -> None:
    class Batched(Numbers):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(
                self.train, batch_sampler=BatchSampler(sampler(self.train), 4, drop_last)
            )

    with Training(settings(tmp_path, epochs=1), tmp_path, kind=Batched) as runner:
        runner.train()
        assert runner.train_state.global_step == NUMBER // 4 + (not drop_last)
        assert len(runner.seen) == (NUMBER - NUMBER % 4 if drop_last else NUMBER)
        assert (runner.seen == sorted(runner.seen)) == (sampler is SequentialSampler)


def test_settings_of_a_split_come_before_those_of_the_data_module(tmp_path: Path) -> None:
    loader = {"batch_size": 5, "num_workers": 0, "train": {"batch_size": 7}}
    with Training(settings(tmp_path, epochs=1, dataloader=loader), tmp_path) as runner:
        runner.train()
        assert runner.train_state.global_step == 3
        assert runner.dataloaders["test"].batch_size == 3


def test_hooks_of_a_trainer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Moving(Numbers):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    dl.data.from_datamodule(Moving(tmp_path), splits=["test"])
    (said,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert "on_after_batch_transfer" in said and "`to_device`" in said
    with pytest.raises(
        ValueError, match=r"predict_dataloader. Received: Numbers, which has loaders for"
    ):
        dl.data.from_datamodule(Numbers(tmp_path), splits=["predict"])


def on_two(root: str, per_node: bool) -> dict[str, Any]:
    with Training(settings(root, epochs=1), root, per_node=per_node) as runner:
        runner.train()
        evaluated = runner.evaluated = []
        figures = runner.evaluate(["val_0"])
        return {"seen": runner.seen, "evaluated": evaluated, "loss": figures["val_0"]["loss"]}


def failing_on_one(root: str) -> str:
    try:
        Training(settings(root), root, fails=True)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize("per_node", [True, False])
def test_two_processes_share_the_samples(per_node: bool, tmp_path: Path) -> None:
    ranks = run_processes(on_two, str(tmp_path), per_node, world_size=2, timeout=120)
    assert [path.name for path in tmp_path.glob("prepared-*")] == ["prepared-0"]
    seen = Counter(number for rank in ranks for number in rank["seen"])
    assert seen.keys() == {2.0 * number for number in range(NUMBER)} and seen.total() <= NUMBER + 1
    evaluated = Counter(number for rank in ranks for number in rank["evaluated"])
    assert evaluated == {100.0 + number: 1 for number in range(7)}
    assert ranks[0]["loss"] == ranks[1]["loss"]


def test_failed_preparation_of_data_ends_all_processes(tmp_path: Path) -> None:
    first, second = run_processes(failing_on_one, str(tmp_path), world_size=2, timeout=120)
    assert first == "OSError: no data"
    assert second.startswith(
        "RuntimeError: Expected Numbers.prepare_data to succeed. Received: OSError: no data on rank 0"
    )
