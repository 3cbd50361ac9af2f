"""albumentations: its generators are private, and every sample is keyed nevertheless.

Library: albumentations
Works: a `Compose` in a dataset, whatever seeds it
Exact: each sample on resume, with any number of workers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, assert_goes_on_alike
from torch import Tensor, nn
from torch.utils.data import Dataset

albumentations = pytest.importorskip("albumentations")
numpy = pytest.importorskip("numpy")


class Images(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.augment = albumentations.Compose(
            [
                albumentations.RandomCrop(6, 6),
                albumentations.HorizontalFlip(p=0.5),
                albumentations.GaussNoise(p=1.0),
                albumentations.OneOf(
                    [albumentations.RandomBrightnessContrast(p=1), albumentations.RandomGamma(p=1)]
                ),
            ]
        )

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = numpy.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=numpy.uint8)
        return torch.from_numpy(self.augment(image=image)["image"]).float().flatten(), torch.zeros(
            1
        )


class Augmented(Seeing):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(108, 1), nn.MSELoss()
        self.datasets = {"train": Images()}

    def values(self, data: Any) -> list[Tensor]:
        return [data[0].clone()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_augmented_samples_are_those_of_the_uninterrupted_run(workers: int, tmp_path: Path) -> None:
    assert_goes_on_alike(Augmented, tmp_path, workers=workers)
