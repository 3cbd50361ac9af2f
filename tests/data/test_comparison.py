"""Datasets that the library divides are the same on all ranks, or the log says which are not."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, Subset, TensorDataset

import danling as dl
from danling.data.comparison import describe, series_of

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
        "with-the-runner": Files("/data", names),
        "order-of-listing": Files("/data", sorted(names, reverse=rank == 1)),
        "array": Arrays(np.arange(24) + rank),
    }
    return made[kind]


class Slots:
    """Without attributes, and with its own answer to a question for one."""

    __slots__ = ()

    def __getitem__(self, index: int) -> object:
        raise LookupError(index)

    def __getattr__(self, name: str) -> object:
        raise LookupError(name)


class Linear(dl.TorchRunner):
    def __init__(self, config: Any, kind: str, split: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.datasets = {"train": dataset("whole", 0), "val": dataset("whole", 0)}
        self.datasets[split] = dataset(kind, self.rank)
        if kind == "with-the-runner":
            self.datasets[split].runner = self  # type: ignore[attr-defined]


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
def test_dataset_different_between_ranks_is_named_once(
    kind: str, where: str, split: str, tmp_path: Path
) -> None:
    main, other = run_processes(warnings_of, str(tmp_path), kind, split, world_size=2)
    assert other == []
    assert (
        len(main) == 1
        and f"The dataset of split '{split}' is not the same on all ranks ({where} differs)"
        in main[0]
    )


@pytest.mark.parametrize(
    "kind", ["whole", "subset-of-every-rank", "directories", "with-the-runner"]
)
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
        np.zeros((0, 3)),
        Slots(),
        np,
        int,
        [[]],
    ],
    ids=[
        *("sparse", "meta", "scalar", "no-dimension", "objects"),
        *("no-elements", "slots", "module", "class", "empty"),
    ],
)
def test_values_of_other_kinds_are_no_error(value: object) -> None:
    holder = Files("", [])
    holder.value = value  # type: ignore[attr-defined]
    assert series_of(holder) == series_of(holder)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_is_no_error() -> None:
    holder = Files("", [])
    holder.value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # type: ignore[attr-defined]
    assert "dataset.value" not in series_of(holder)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse CSR tensor support",
    "ignore:.*quantize",
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ],
    ids=["sparse", "rows", "nested", "meta", "quantized"],
)
def test_batch_with_a_tensor_that_is_not_strided_is_no_error(make: Any) -> None:
    assert describe((make(), 1)) == describe((make(), 1)) != describe((make(), 2))


@pytest.mark.parametrize(
    "value", [np.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).t(), np.float32(2)]
)
def test_small_batch_is_described_by_all_its_values(value: Any) -> None:
    assert describe(value) == (
        str(value.dtype),
        tuple(value.shape),
        np.asarray(value).reshape(-1).tolist(),
    )


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
@pytest.mark.parametrize("other", [1.0, 1, True])
def test_arrays_that_are_nearly_all_zero_are_told_apart(kind: Any, other: Any) -> None:
    """Bags of words of two ranks were equal where all 64 values that were compared were zero."""
    dtype = kind([other]).dtype
    bags = [np.zeros((4, 5000)), np.zeros((4, 5000))]
    bags[0][:, 17], bags[1][:, 23] = other, other
    first, second = (kind(bag.tolist(), dtype=dtype) for bag in bags)
    assert describe(first) != describe(second)
    assert describe(first) == describe(kind(bags[0].tolist(), dtype=dtype))


@pytest.mark.parametrize("shape", [(64, 1, 28, 28), (1, 28, 28), (8, 3, 32, 32)])
def test_images_with_dark_borders_are_told_apart(shape: tuple[int, ...]) -> None:
    images = [
        torch.nn.functional.pad(torch.rand(*shape[:-2], shape[-2] - 8, shape[-1] - 8), (4, 4, 4, 4))
        for _ in range(2)
    ]
    assert describe(images[0]) != describe(images[1])
    assert series_of(TensorDataset(images[0])) != series_of(TensorDataset(images[1]))


@pytest.mark.parametrize("transposed", [np.transpose, torch.t], ids=["numpy", "torch"])
def test_array_in_another_order_is_not_copied(transposed: Any) -> None:
    """Of one in a file, all of the file would be read."""
    array = np.arange(600_000).reshape(3, 200_000)
    value = transposed(array if transposed is np.transpose else torch.from_numpy(array))
    holder = Files("", [])
    holder.value = value  # type: ignore[attr-defined]
    with LargestResult() as copies:
        series_of(holder)  # torch imports modules for the first operation in a mode
        tracemalloc.start()
        found = series_of(holder)["dataset.value"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    flat = np.asarray(value).reshape(-1)
    places = [2_654_435_761 * number % flat.size for number in range(64)]
    assert found == repr((tuple(value.shape), flat[places].tolist()))
    assert max(peak, copies.largest) < array.nbytes / 10


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns, other than a view."""

    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.largest = max(self.largest, result.nbytes)
        return result
