"""webdataset: each sample once a pass and on resume.

Library: webdataset
Works: `WebDataset` with shards, decoders and workers, `WebLoader`
Exact: resume, read again up to the position, where `shuffle` is given `rng=random.Random(0)`, or `detshuffle` the epoch
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, seen
from torch import Tensor, nn

webdataset = pytest.importorskip("webdataset")

SHARDS, EACH = 4, 6
ALL = set(range(SHARDS * EACH))


def shards(root: Path) -> list[str]:
    for shard in range(SHARDS):
        path = root / f"shard-{shard}.tar"
        if not path.exists():
            with webdataset.TarWriter(str(path)) as writer:
                for number in range(shard * EACH, (shard + 1) * EACH):
                    writer.write(
                        {"__key__": f"{number:03}", "cls": number, "json": {"value": number / 4}}
                    )
    return [str(root / f"shard-{shard}.tar") for shard in range(SHARDS)]


def as_tensors(sample: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor([float(sample[0])]), torch.tensor([sample[1]["value"]])


class ByEpoch(webdataset.WebDataset):  # type: ignore[misc, name-defined]
    """Tells the stages that count passes which one it is, as the page of libraries says."""

    def set_epoch(self, epoch: int) -> None:
        for stage in self.pipeline:
            if hasattr(stage, "epoch"):
                stage.epoch = epoch - 1


def read(root: Path, kind: Any = webdataset.WebDataset, **options: Any) -> Any:
    return kind(shards(root), **{"shardshuffle": False, **options}).decode().to_tuple("cls", "json")


KINDS: dict[str, Callable[[Path], Any]] = {
    "in turn": lambda root: read(root).map(as_tensors),
    "epoch": lambda root: (
        read(root, ByEpoch, shardshuffle=4, detshuffle=True, seed=3)
        .shuffle(8, rng=random.Random(5))
        .map(as_tensors)
    ),
    "rng": lambda root: read(root).shuffle(8, rng=random.Random(7)).map(as_tensors),
}


class Reading(Seeing):
    def __init__(self, config: dict[str, Any], root: Path, kind: str, own: bool) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        dataset = KINDS[kind](root)
        if own:
            self.dataloaders = {"train": webdataset.WebLoader(dataset, batch_size=4)}
        else:
            self.datasets = {"train": dataset}

    def values(self, data: Any) -> list[int]:
        return data[0].flatten().int().tolist()


def read_by_run(
    root: Path, kind: str, workers: int, stop: int | None = None, *, own: bool = False
) -> list[int]:
    root.mkdir(exist_ok=True)
    reading = partial(Reading, root=root, kind=kind, own=own)
    return seen(reading, root / "run", workers=workers, stop=stop, samples=2 * len(ALL), epochs=2)


@pytest.mark.parametrize(
    ("kind", "own"),
    [("in turn", False), ("in turn", True), ("rng", False), ("rng", True), ("epoch", False)],
)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_are_those_of_the_uninterrupted_run(
    kind: str, own: bool, workers: int, tmp_path: Path
) -> None:
    whole = read_by_run(tmp_path / "whole", kind, workers, own=own)
    assert Counter(whole) == dict.fromkeys(ALL, 2)
    assert (whole[: len(ALL)] == sorted(ALL)) == (kind == "in turn" and not (workers and not own))
    for stop in (3, 8):
        root = tmp_path / str(stop)
        assert [
            *read_by_run(root, kind, workers, stop, own=own),
            *read_by_run(root, kind, workers, own=own),
        ] == whole
