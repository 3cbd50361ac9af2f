"""mosaicml-streaming: its own loader keeps the position. Skipped where it is not installed: it wants older versions of others.

Library: mosaicml-streaming
Works: `StreamingDataLoader` in `self.dataloaders`; a bare `StreamingDataset`, whose state is not its own, is refused with the mend
Exact: samples on resume, by the state of its loader
"""

from __future__ import annotations

import importlib
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.seen import Seeing, seen
from support.vision import import_or_skip
from torch import nn

import_or_skip("torchvision")
try:
    place_of_package = str(metadata.distribution("mosaicml-streaming").locate_file(""))
except metadata.PackageNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)
sys.modules.pop("streaming", None)  # an example has the same name
sys.path.insert(0, place_of_package)
streaming = importlib.import_module("streaming")

NUMBER = 24


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Path]:
    """A directory of shards, and no shared memory left behind."""
    place = tmp_path / f"shards-{uuid.uuid4()}"
    with streaming.MDSWriter(
        out=str(place), columns={"x": "float32", "y": "float32"}, size_limit=128
    ) as writer:
        for number in range(NUMBER):
            writer.write({"x": float(number), "y": 0.0})
    streaming.base.util.clean_stale_shared_memory()
    yield place
    streaming.base.util.clean_stale_shared_memory()


def read(place: Path) -> Any:
    return streaming.StreamingDataset(
        local=str(place), shuffle=True, shuffle_seed=3, batch_size=4, num_canonical_nodes=1
    )


class Reading(Seeing):
    def __init__(self, config: dict[str, Any], place: Path, own_workers: int) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.dataloaders = {
            "train": streaming.StreamingDataLoader(
                read(place), batch_size=4, num_workers=own_workers
            )
        }

    def values(self, data: Any) -> list[int]:
        return data["input"].flatten().int().tolist()

    def train_step(self, data: Any) -> Any:
        return super().train_step(
            {"input": data["x"].float()[:, None], "target": data["y"].float()[:, None]}
        )


def read_by_run(root: Path, place: Path, workers: int, stop: int | None = None) -> list[int]:
    reading = partial(Reading, place=place, own_workers=workers)
    found = seen(reading, root, stop=stop, samples=2 * NUMBER, epochs=2)
    streaming.base.util.clean_stale_shared_memory()
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_are_those_of_the_uninterrupted_run(
    workers: int, shards: Path, tmp_path: Path
) -> None:
    whole = read_by_run(tmp_path / "whole", shards, workers)
    assert Counter(whole) == dict.fromkeys(range(NUMBER), 2) and whole[:NUMBER] != whole[NUMBER:]
    for stop in (2, 6, 9):
        root = tmp_path / str(stop)
        assert [
            *read_by_run(root, shards, workers, stop),
            *read_by_run(root, shards, workers),
        ] == whole
