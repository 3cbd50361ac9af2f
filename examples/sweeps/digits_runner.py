"""What the programs of this folder train: a small network on handwritten digits. Put your own runner in its place."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import danling as dl


class Digits(dl.Runner):
    """A network with one hidden layer, as wide as `model.width` says."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        digits = TensorDataset(images.float() / 16, labels)
        parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
        self.datasets = dict(zip(("train", "val"), parts))
        width = int(config.model.width)
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}
