"""datasets: map-style data and streams give the samples of the uninterrupted run, each once a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import danling as dl

datasets = pytest.importorskip("datasets")

NUMBER = 48


def plain() -> Any:
    columns = {"input": [[float(i)] for i in range(NUMBER)], "target": [[0.0]] * NUMBER}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "input": row["input"] + torch.rand(1) / 4}


KINDS: dict[str, Callable[[], Any]] = {
    "map": plain,
    "stream": lambda: plain().to_iterable_dataset(num_shards=4).map(noisy),
    "buffer": lambda: plain().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10),
}


class Rows(dl.Runner):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.datasets = datasets.DatasetDict({"train": plain()}) if kind == "dict" else {"train": KINDS[kind]()}
        self.seen: list[float] = []

    def train_step(self, data: Any) -> Any:
        self.seen += data["input"].flatten().tolist()
        return super().train_step(data)


def seen(root: Path, kind: str, workers: int, epochs: int, stop: int | None = None) -> list[float]:
    config: dict[str, Any] = {"seed": 1, "log": False, "epochs": epochs, "dir": str(root), "auto_resume": True}
    config |= {"optim": {"type": "sgd", "lr": 1e-4}, "dataloader": {"batch_size": 4, "num_workers": workers}}

    class Stopped(Rows):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            if self.train_state.global_step + 1 == stop:
                self.stop()

    with Stopped(config, kind) as runner:
        runner.train()
        return runner.seen


@pytest.mark.parametrize("kind", ["map", "stream", "buffer"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_are_those_of_the_uninterrupted_run(
    kind: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = seen(tmp_path / "whole", kind, workers, 2)
    assert Counter(map(int, whole)) == dict.fromkeys(range(NUMBER), 2)
    for stop in (5, 12, 17):  # within a pass, at its end, within the next
        root = tmp_path / str(stop)
        assert [*seen(root, kind, workers, 2, stop), *seen(root, kind, workers, 2)] == whole
    assert not any("cannot be saved" in record.getMessage() for record in caplog.records)


def test_a_shuffled_stream_is_shuffled_anew_in_each_pass(tmp_path: Path) -> None:
    whole = seen(tmp_path, "buffer", 0, 2)
    assert whole[:NUMBER] != whole[NUMBER:]


def test_a_dict_of_datasets_is_taken_as_it_is(tmp_path: Path) -> None:
    assert Counter(map(int, seen(tmp_path, "dict", 0, 1))) == dict.fromkeys(range(NUMBER), 1)
