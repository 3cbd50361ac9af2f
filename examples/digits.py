"""Handwritten digits of scikit-learn: a small network, ten epochs, 0.97 test accuracy in about ten seconds.

python examples/digits.py                                 # then: --epochs 20 --auto_resume true goes on from there
torchrun --nproc-per-node 2 examples/digits.py            # the same on two processes
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import danling as dl


class DigitsRunner(dl.Runner):
    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        digits = TensorDataset(images.float() / 16, labels)
        parts = random_split(digits, [0.7, 0.1, 0.2], generator=torch.Generator().manual_seed(0))
        self.datasets = dict(zip(("train", "val", "test"), parts))
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="digits", epochs=10, evaluate_splits=["val"], score_name="acc"
    )
    config.dataloader.batch_size = 16
    config.optim = {"type": "adamw", "lr": 1e-2}
    config.scheduler = {"type": "cosine", "warmup_steps": 0.1}
    config.parse()
    with DigitsRunner(config) as runner:
        runner.train()
        scores = runner.evaluate("test")["test"]
        runner.print(f"test accuracy {scores['acc']:.3f}, loss {scores['loss']:.3f}")
