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
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl

albumentations = pytest.importorskip("albumentations")
numpy = pytest.importorskip("numpy")


class Images(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.augment = albumentations.Compose(
            [
                albumentations.RandomCrop(6, 6),
                albumentations.HorizontalFlip(p=0.5),
                albumentations.GaussNoise(p=1.0),
                albumentations.OneOf([albumentations.RandomBrightnessContrast(p=1), albumentations.RandomGamma(p=1)]),
            ]
        )

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = numpy.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=numpy.uint8)
        return torch.from_numpy(self.augment(image=image)["image"]).float().flatten(), torch.zeros(1)


class Augmented(dl.Runner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(108, 1), nn.MSELoss()
        self.datasets = {"train": Images()}
        self.seen: list[Tensor] = []

    def train_step(self, data: Any) -> Any:
        self.seen.append(data[0].clone())
        return super().train_step(data)


def seen(root: Path, steps: int, workers: int) -> list[Tensor]:
    config: dict[str, Any] = {"seed": 1, "log": False, "steps": steps, "dir": str(root), "auto_resume": True}
    config |= {"optim": {"type": "sgd", "lr": 1e-6}, "dataloader": {"batch_size": 4, "num_workers": workers}}
    with Augmented(config) as runner:
        runner.train()
        return runner.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_samples_are_those_of_the_uninterrupted_run(workers: int, tmp_path: Path) -> None:
    whole = seen(tmp_path / "whole", 14, 0)
    parts = [*seen(tmp_path / "parts", 5, workers), *seen(tmp_path / "parts", 14, workers)]
    assert len(whole) == len(parts) == 14
    assert all(map(torch.equal, parts, whole))
    assert not torch.equal(whole[0], whole[6])  # another pass, another crop
