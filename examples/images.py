"""Image classification with augmentation: a small convolutional network on the digits of scikit-learn.

python examples/images.py                                 # 30 s of processor time
python examples/images.py --data.augment false            # the same without
python examples/images.py --dataloader.num_workers 2      # the same images: what is drawn goes by the sample, not by the worker
torchrun --nproc-per-node 2 examples/images.py --dataloader.batch_size 16

It has 200 images to learn from and prints 0.957 test accuracy; without augmentation 0.913. Averaged weights (EMA) are
evaluated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import Dataset, TensorDataset

import danling as dl


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are turned, shifted and scaled a little, each time anew.

    Draws from torch's own generator, which is seeded for each sample: a resumed run sees what the whole run would have seen.

    Args:
        images: Of shape (N, 1, H, W).
        labels: Of shape (N,).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        turn, across, down, size = (torch.rand(4) * 2 - 1).tolist()
        angle, scale = turn * math.pi / 12, 1 + 0.15 * size
        cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
        placed = torch.tensor([[cos, -sin, across / 8], [sin, cos, down / 8]])
        image = self.images[index][None]
        grid = affine_grid(placed[None], list(image.shape), align_corners=False)
        return grid_sample(image, grid, align_corners=False)[0], self.labels[index]


class ImageRunner(dl.Runner):
    """Learns the digit of an image of 8 x 8 pixels."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        images = images.float().view(-1, 1, 8, 8) / 16
        kind: Any = Augmented if self.config.data.augment else TensorDataset
        self.datasets = {
            "train": kind(images[:200], labels[:200]),
            "val": TensorDataset(images[800:1000], labels[800:1000]),
            "test": TensorDataset(images[1000:], labels[1000:]),
        }
        self.model = nn.Sequential(
            *self.block(1, 32),
            *self.block(32, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.metrics = {"acc": dl.metrics.accuracy}

    @staticmethod
    def block(into: int, out: int) -> tuple[nn.Module, ...]:
        """Return two convolutions, after which an image has half as many rows and columns."""
        return (
            nn.Conv2d(into, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="images", epochs=120, evaluate_splits=["val"], score_name="acc"
    )
    config.data = {"augment": True}
    config.dataloader.batch_size = 32
    config.optim = {"type": "adamw", "lr": 4e-3, "weight_decay": 0.05}
    config.scheduler = {"type": "cosine", "warmup_steps": 0.1}
    config.ema = {"enabled": True, "decay": 0.98}
    config.parse()
    with ImageRunner(config) as runner:
        runner.train()
        scores = runner.evaluate("test")["test"]
        runner.print(f"test accuracy {scores['acc']:.3f} of {len(runner.datasets['test'])} images")
