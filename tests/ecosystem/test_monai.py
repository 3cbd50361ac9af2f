"""MONAI: its transforms hold private generators, and every sample is keyed nevertheless.

Library: monai
Works: `Compose`, `RandomizableTransform`s, `OneOf`, arrays and dictionaries, `CacheDataset` and `list_data_collate`
Exact: each sample on resume, with any number of workers
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, assert_goes_on_alike
from torch import Tensor, nn

pytest.importorskip("monai")

from monai.data import CacheDataset, Dataset, list_data_collate
from monai.transforms import (
    Compose,
    OneOf,
    RandAdjustContrast,
    RandFlipd,
    RandGaussianNoised,
    RandSpatialCropd,
    Transform,
)


class Brighter(Transform):
    """A transform of arrays, made to take a dictionary."""

    def __init__(self) -> None:
        self.transform = OneOf(
            [RandAdjustContrast(prob=1.0), RandAdjustContrast(prob=1.0, gamma=(2, 3))]
        )

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "input": self.transform(data["input"])}


def scans(cached: bool) -> Any:
    rows = [
        {"input": torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(n)), "target": 0.0}
        for n in range(24)
    ]
    keys = ["input"]
    augment = Compose(
        [
            RandSpatialCropd(keys, roi_size=(6, 6), random_size=False),
            RandFlipd(keys, prob=0.5),
            RandGaussianNoised(keys, prob=1.0),
            Brighter(),
        ]
    )
    return (
        CacheDataset(rows, augment, cache_num=10, progress=False)
        if cached
        else Dataset(rows, augment)
    )


class Scans(Seeing):
    def __init__(self, config: dict[str, Any], cached: bool) -> None:
        super().__init__(config)
        self.model, self.criterion = (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.Flatten(0)),
            nn.MSELoss(),
        )
        self.datasets = {"train": scans(cached)}
        self.config.dataloader.collate_fn = list_data_collate

    def values(self, data: Any) -> list[Tensor]:
        return [data["input"].clone()]

    def train_step(self, data: Any) -> Any:
        return super().train_step(
            {"input": data["input"].as_tensor(), "target": data["target"].float()}
        )


@pytest.mark.parametrize(
    ("cached", "workers"), [(True, 0), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_augmented_samples_are_those_of_the_uninterrupted_run(
    cached: bool, workers: int, tmp_path: Path
) -> None:
    assert_goes_on_alike(partial(Scans, cached=cached), tmp_path, workers=workers)
