"""torchvision: transforms v2 draw from torch's stream, and every sample is keyed. Skipped where torchvision is not installed.

Library: torchvision
Works: transforms v2 in a dataset, `CutMix` and `MixUp` in a `collate_fn`
Exact: each sample on resume, with any number of workers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, assert_goes_on_alike
from support.vision import import_or_skip
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

v2 = import_or_skip("torchvision.transforms.v2")


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.augment = v2.Compose(
            [
                v2.RandomResizedCrop(6, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandAugment(num_ops=1),
                v2.ToDtype(torch.float32, scale=True),
                v2.GaussianNoise(),
            ]
        )

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randint(
            0, 255, (3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(index)
        )
        return self.augment(image), index % 3


class Mixing:
    def __init__(self) -> None:
        self.mix = v2.RandomChoice([v2.CutMix(num_classes=3), v2.MixUp(num_classes=3)])

    def __call__(self, samples: list[Any]) -> Any:
        return self.mix(*default_collate(samples))


class Augmented(Seeing):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = (
            nn.Sequential(nn.Flatten(), nn.Linear(108, 3)),
            nn.CrossEntropyLoss(),
        )
        self.datasets = {"train": Images()}
        self.config.dataloader.collate_fn = Mixing()

    def values(self, data: Any) -> list[Tensor]:
        return [data[0].clone(), data[1].clone()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_augmented_samples_are_those_of_the_uninterrupted_run(workers: int, tmp_path: Path) -> None:
    assert_goes_on_alike(Augmented, tmp_path, workers=workers)
