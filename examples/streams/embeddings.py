"""Embeddings that are computed once, kept in files, and trained on for many epochs, by as many runs as one likes.

python examples/streams/embeddings.py                     # 26 s of processor time; a second time nothing is computed anew
python examples/streams/embeddings.py --epochs 40 --optim.lr 1e-3      # another run on the same embeddings

The encoder takes the place of a large frozen model: random features whose products are those of a Gaussian kernel (Rahimi and Recht, 2007,
https://papers.nips.cc/paper/3182). A linear head on them has 0.942 test accuracy, on the images themselves 0.909.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import danling as dl
from danling.stream import DirectoryStore, FeatureDataset, FeatureProducer, FileChannel

WIDTH = 1024


class Digits(Dataset[dict[str, Tensor]]):
    """Images of 64 numbers in [0, 1] with label and number.

    Args:
        count: How many, 1,797 at most.
    """

    draws_random = False

    def __init__(self, count: int) -> None:
        images, labels = (torch.from_numpy(array)[:count] for array in load_digits(return_X_y=True))
        self.images, self.labels = images.float() / 16, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "id": torch.tensor(index),
            "input": self.images[index],
            "target": self.labels[index],
        }


class Encoder(nn.Module):
    """Random features, sqrt(2 / D) cos(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("directions", torch.randn(WIDTH, 64, generator=generator))
        self.register_buffer("phases", 2 * math.pi * torch.rand(WIDTH, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings (B, 1024) of images (B, 64)."""
        embeddings: Tensor = (images @ self.directions.T + self.phases).cos() * math.sqrt(2 / WIDTH)  # type: ignore[operator]
        return embeddings


class Embedder(FeatureProducer):
    """Computes the embedding of every image that has none yet."""

    def __init__(self, config: dl.RunnerConfig, images: Digits, **stream: Any) -> None:
        super().__init__(config, max_in_flight=None, **stream)
        self.model = Encoder()
        self.datasets = {"all": images}

    def capture(self, batch: Any) -> dict[str, Tensor]:
        """Return embeddings and labels."""
        return {"input": self.model(batch["input"]), "target": batch["target"]}


class Head(dl.Runner):
    """Trains a linear head."""

    def __init__(self, config: dl.RunnerConfig, data: Dataset[Any], width: int) -> None:
        super().__init__(config)
        count = len(data)  # type: ignore[arg-type]
        first = count - count // 4
        self.datasets = {
            "train": Subset(data, range(first)),
            "test": Subset(data, range(first, count)),
        }
        self.model = nn.Linear(width, 10)
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}

    def to_device(self, data: Any) -> Any:
        """Return the batch without the number of its samples, which the model does not take."""
        return super().to_device({name: data[name] for name in ("input", "target")})


if __name__ == "__main__":
    config = dl.RunnerConfig(seed=1, epochs=10, lineage="head")
    config.dataloader.batch_size = 20
    config.optim = {"type": "adamw", "lr": 1e-2}
    config.features = {"path": "experiments/embeddings", "images": 1797}
    config.parse()
    place = Path(config.features.path)
    store, channel = DirectoryStore(place / "objects"), FileChannel(place / "log")
    produces = dl.RunnerConfig(seed=1, lineage="embedder", dataloader={"batch_size": 100})
    images = Digits(config.features.images)
    with Embedder(produces, images, store=store, channel=channel) as producer:
        made = producer.produce()
    # The list stays as it is, so it is shuffled as any dataset is.
    embeddings = FeatureDataset(store, channel.read(0, channel.published()))
    for name, data, width in (("embeddings", embeddings, WIDTH), ("images", images, 64)):
        settings = config.copy()
        settings.lineage = f"head-{name}"
        with Head(settings, data, width) as runner:
            runner.train()
            runner.print(f"test accuracy {runner.evaluate('test')['test']['acc']:.3f} on {name}")
    print(f"{made} embeddings were computed, {channel.published()} are there")
