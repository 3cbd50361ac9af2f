"""Distillation: a small student learns from the soft targets of a teacher, which another runner computes while it trains.

python examples/streams/distillation.py                   # 16 s of processor time
python examples/streams/distillation.py --steps 300       # any key of the student's run

The teacher learns from 1,000 labelled digits. The student sees 12,000 noisy images of them, and no label. It prints test accuracy 0.920 of
the teacher, 0.911 of the student, and 0.771 of the same student from 100 labels. In two processes `run_together` becomes
`producer.produce()` in one and `student.train()` in the other, with a DirectoryStore and a SQLiteChannel between them, as in
`examples/draft.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import danling as dl
from danling.data import derive_seed
from danling.stream import FeatureProducer, MemoryChannel, MemoryStore, StreamLoader, run_together

TEMPERATURE = 3.0


def digits() -> tuple[Tensor, Tensor]:
    """Return images (1797, 64) in [0, 1] and labels (1797,)."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return images.float() / 16, labels


def network(width: int) -> nn.Module:
    """Return a network of one hidden layer."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Classifier(dl.Runner):
    """Learns from labels.

    Args:
        config: Settings.
        width: Of the hidden layer.
        labelled: How many images it is shown.
    """

    def __init__(self, config: dl.RunnerConfig, *, width: int, labelled: int = 1000) -> None:
        super().__init__(config)
        images, labels = digits()
        self.datasets = {"test": TensorDataset(images[1300:], labels[1300:])}
        if labelled:
            self.datasets["train"] = TensorDataset(images[:labelled], labels[:labelled])
        self.model = network(width)
        self.criterion: Any = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


class NoisyDigits(Dataset[dict[str, Tensor]]):
    """Digits with noise, each a function of its number."""

    draws_random = False

    def __init__(self, count: int) -> None:
        self.images = digits()[0][:1000]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed("noise", index))
        image = self.images[index % len(self.images)]
        return {
            "id": torch.tensor(index),
            "image": image + 0.1 * torch.randn(64, generator=generator),
        }


class Teacher(FeatureProducer):
    """Publishes images with what the teacher says of them."""

    def __init__(
        self, config: dl.RunnerConfig, model: nn.Module, count: int, **stream: Any
    ) -> None:
        super().__init__(config, **stream)
        self.model = model
        self.datasets = {"train": NoisyDigits(count)}

    def capture(self, batch: Any) -> dict[str, Tensor]:
        """Return images (B, 64) and scores (B, 10)."""
        return {"input": batch["image"], "target": self.model(batch["image"])}


class Student(Classifier):
    """Learns from the probabilities of the teacher (Hinton et al., https://arxiv.org/abs/1503.02531)."""

    def __init__(self, config: dl.RunnerConfig, *, width: int, train: StreamLoader) -> None:
        super().__init__(config, width=width, labelled=0)
        self.dataloaders["train"] = train

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy with the teacher at a temperature; in an evaluation that with the labels."""
        if not target.is_floating_point():
            loss: Tensor = self.criterion(pred, target)
            return loss
        return (
            F.cross_entropy(pred / TEMPERATURE, (target / TEMPERATURE).softmax(-1)) * TEMPERATURE**2
        )

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return the number of samples, over which both losses are means."""
        return float(len(target))


def config_of(lineage: str, steps: int = 600) -> dl.RunnerConfig:
    """Return settings of one of the runs."""
    config = dl.RunnerConfig(seed=1, steps=steps, lineage=lineage, evaluate_splits=["test"])
    config.dataloader.batch_size = 20
    config.optim = {"type": "adamw", "lr": 1e-2}
    return config


if __name__ == "__main__":
    config = config_of("student")
    config.teacher = {"steps": 600}
    config.checkpoint.interval = 20  # the teacher waits for one when it is far ahead
    config.parse()
    accuracies = {}
    with Classifier(config_of("teacher", config.teacher.steps), width=256) as runner:
        runner.train()
        accuracies["the teacher"] = runner.evaluate("test")["test"]["acc"]
        model = runner.unwrapped_model.requires_grad_(False)

    store, channel = MemoryStore(), MemoryChannel()
    produces = dl.RunnerConfig(seed=1, lineage="soft", dataloader={"batch_size": 50})
    with (
        Teacher(
            produces, model, 20 * (config.steps or 0), store=store, channel=channel
        ) as producer,
        Student(config, width=16, train=StreamLoader(store, channel, batch_size=20)) as student,
    ):
        run_together(producer, student)
        accuracies["the student"] = student.evaluate("test")["test"]["acc"]

    with Classifier(config_of("alone", steps=config.steps or 0), width=16, labelled=100) as runner:
        runner.train()
        accuracies["a student from 100 labels"] = runner.evaluate("test")["test"]["acc"]
    for name, accuracy in accuracies.items():
        print(f"test accuracy {accuracy:.3f} of {name}")
