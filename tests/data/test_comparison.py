"""Datasets that the library divides are the same on all ranks, or the log says which are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import danling as dl
from danling.data.comparison import series_of

SAMPLES = torch.arange(48.0).reshape(24, 2)


class Files(Dataset[Any]):
    """A dataset of files of which each rank has a copy in a directory of its own."""

    def __init__(self, directory: str, names: list[str]) -> None:
        self.directory, self.files = directory, [f"{directory}/{name}" for name in names]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = SAMPLES[int(Path(self.files[index]).stem)]
        return row, row[:1]


class Arrays(Files):
    def __init__(self, rows: Any) -> None:
        super().__init__("", [str(index) for index in range(24)])
        self.rows = {"row": rows}


def dataset(kind: str, rank: int) -> Dataset[Any]:
    whole = TensorDataset(SAMPLES, SAMPLES[:, :1])
    names = [str(index) for index in range(24)]
    made: dict[str, Dataset[Any]] = {
        "whole": whole,
        "subset-of-every-rank": Subset(whole, range(0, 24, 2)),
        "directories": Files(f"/scratch/{rank}", names),
        "divided-by-hand": Subset(whole, range(rank, 24, 2)),
        "split-at-random": Subset(whole, np.random.default_rng(rank).permutation(24)[:12].tolist()),
        "other-tensors": TensorDataset(SAMPLES + rank, SAMPLES[:, :1]),
        "order-of-listing": Files("/data", sorted(names, reverse=rank == 1)),
        "array": Arrays(np.arange(24) + rank),
    }
    return made[kind]


class Linear(dl.TorchRunner):
    def __init__(self, config: Any, kind: str, split: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.datasets = {"train": dataset("whole", 0), "val": dataset("whole", 0)}
        self.datasets[split] = dataset(kind, self.rank)


def warnings_of(directory: str, kind: str, split: str) -> list[str]:
    found = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    config = {"dir": directory, "epochs": 2, "dataloader.batch_size": 4, "stack": "ddp"}
    with Linear(config, kind, split) as runner:
        runner.train()
    return [each for each in found if "same on all ranks" in each]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("divided-by-hand", "dataset.indices"),
        ("split-at-random", "dataset.indices"),
        ("other-tensors", "dataset.tensors[0]"),
        ("order-of-listing", "dataset.files"),
        ("array", "dataset.rows['row']"),
    ],
)
def test_dataset_that_differs_between_ranks_is_named_once(kind: str, where: str, split: str, tmp_path: Path) -> None:
    main, other = run_processes(warnings_of, str(tmp_path), kind, split, world_size=2)
    assert other == []
    assert (
        len(main) == 1 and f"The dataset of split '{split}' is not the same on all ranks ({where} differs)" in main[0]
    )


@pytest.mark.parametrize("kind", ["whole", "subset-of-every-rank", "directories"])
def test_same_dataset_on_all_ranks_is_not_named(kind: str, tmp_path: Path) -> None:
    assert run_processes(warnings_of, str(tmp_path), kind, "train", world_size=2) == [[], []]


def test_values_are_compared_over_the_whole_length() -> None:
    one, other = torch.zeros(6400), torch.zeros(6400)
    other[-100:] = 1
    assert series_of(TensorDataset(one)) != series_of(TensorDataset(other))
    assert series_of(TensorDataset(one)) == series_of(TensorDataset(one.clone()))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        np.float32(1),
        np.array(1),
        np.array([None, "a"]),
        int,
        [[]],
    ],
    ids=["sparse", "meta", "scalar", "no-dimension", "objects", "class", "empty"],
)
def test_values_of_other_kinds_are_no_error(value: object) -> None:
    holder = Files("", [])
    holder.value = value  # type: ignore[attr-defined]
    assert series_of(holder) == series_of(holder)
