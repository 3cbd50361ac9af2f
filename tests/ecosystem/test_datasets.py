"""datasets: map-style data and streams give the samples of the uninterrupted run, each once a pass.

Library: datasets
Works: `Dataset`, `DatasetDict`, `IterableDataset` with shards, shuffle buffers and `map(batched=True)`, in your own `DataLoader` too
Exact: each sample once a pass and on resume, with 0 and 2 workers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, seen
from torch import nn
from torch.utils.data import DataLoader

datasets = pytest.importorskip("datasets")

NUMBER = 48


def plain() -> Any:
    columns = {"input": [[float(i)] for i in range(NUMBER)], "target": [[0.0]] * NUMBER}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "input": row["input"] + torch.rand(1) / 4}


def jitter(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "input": rows["input"] + torch.rand(len(rows["input"]), 1) / 4}


def stream() -> Any:
    return plain().to_iterable_dataset(num_shards=4)


def in_tens(data: Any, function: Callable[[Any], Any]) -> Any:
    return data.map(function, batched=True, batch_size=10)


def draws_nothing(data: Any) -> Any:
    data.draws_random = False
    return data


QUICK = {(0, "stream"), (0, "buffer"), (0, "groups that draw")}
KINDS: dict[str, Callable[[], Any]] = {
    "map": plain,
    "stream": lambda: stream().map(noisy),
    "buffer": lambda: stream().shuffle(seed=3, buffer_size=10),
    "groups that draw": lambda: in_tens(stream(), jitter),
    "groups without draws": lambda: draws_nothing(in_tens(stream(), dict)),
}


class Rows(Seeing):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.datasets = (
            datasets.DatasetDict({"train": plain()}) if kind == "dict" else {"train": KINDS[kind]()}
        )

    def values(self, data: Any) -> list[float]:
        return data["input"].flatten().tolist()


class OwnLoader(Rows):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config, kind)
        self.dataloaders = {"train": DataLoader(self.datasets.pop("train"), batch_size=4)}


def read_by_run(
    root: Path, kind: str, workers: int, epochs: int, stop: int | None = None, *, own: bool = False
) -> list[float]:
    return seen(
        partial(OwnLoader if own else Rows, kind=kind),
        root,
        workers=workers,
        stop=stop,
        epochs=epochs,
    )


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        pytest.param(workers, kind, marks=[] if (workers, kind) in QUICK else pytest.mark.slow)
        for workers in (0, 2)
        for kind in sorted(KINDS)
    ],
)
def test_samples_are_those_of_the_uninterrupted_run(
    kind: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = read_by_run(tmp_path / "whole", kind, workers, 2)
    assert Counter(map(int, whole)) == dict.fromkeys(range(NUMBER), 2)
    assert (whole[:NUMBER] != whole[NUMBER:]) or kind == "groups without draws"
    # Within a pass, at its end, within the next.
    for stop in (7, 12, 17):
        root = tmp_path / str(stop)
        assert [
            *read_by_run(root, kind, workers, 2, stop),
            *read_by_run(root, kind, workers, 2),
        ] == whole
    if workers:
        return  # which say it in their own processes
    said = [record.getMessage() for record in caplog.records]
    read_again = {message.rpartition("dropped. ")[2] for message in said if "read again" in message}
    groups = {message for message in read_again if "Set draws_random = False on it" in message}
    assert len(read_again) == (kind not in ("map", "stream", "groups without draws"))
    assert groups == read_again or kind == "buffer"


@pytest.mark.parametrize("kind", ["buffer", "groups that draw"])
def test_a_loader_of_the_users_own_goes_on_alike(kind: str, tmp_path: Path) -> None:
    whole = read_by_run(tmp_path / "whole", kind, 0, 1, own=True)
    assert [
        *read_by_run(tmp_path / "parts", kind, 0, 1, 5, own=True),
        *read_by_run(tmp_path / "parts", kind, 0, 1, own=True),
    ] == whole
    assert Counter(map(int, whole)) == dict.fromkeys(range(NUMBER), 1)


def test_a_dict_of_datasets_is_taken_as_it_is(tmp_path: Path) -> None:
    assert Counter(map(int, read_by_run(tmp_path, "dict", 0, 1))) == dict.fromkeys(range(NUMBER), 1)
