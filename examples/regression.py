"""Regression: disease progression of 442 diabetes patients from ten measurements (scikit-learn).

python examples/regression.py                             # 5 s of processor time

It explains 0.565 of the variance of the test set, with a mean absolute error of 44.3. A linear least-squares fit explains 0.573.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


def load_patients() -> tuple[dict[str, TensorDataset], Tensor, Tensor]:
    """Return the patients of each split, scaled by the training set, and the mean and deviation of its targets."""
    inputs, targets = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:310], "val": order[310:354], "test": order[354:]}
    train = parts["train"]
    mean, std = targets[train].mean(), targets[train].std()
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    scaled = (targets - mean) / std
    return (
        {name: TensorDataset(inputs[rows], scaled[rows]) for name, rows in parts.items()},
        mean,
        std,
    )


class DiabetesRunner(dl.Runner):
    """Predicts one number a patient, in units of the training set's standard deviation."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.datasets, self.mean, self.std = load_patients()
        self.model = nn.Sequential(
            nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1), nn.Flatten(0)
        )
        self.criterion = nn.MSELoss()
        # A callable returns a mean, one value a sample, or a sum and its weight; the last two are what R2 is made of.
        self.metrics = {
            "mae": self.absolute_error,
            "square": lambda pred, target: target.square(),
            "first": lambda pred, target: target,
        }

    def absolute_error(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the error of each patient in the units of the data, of shape (B,)."""
        return (pred - target).abs() * self.std

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        """Return loss and mean absolute error, and the share of the variance that is explained."""
        result = super().summarize(split, totals)
        variance = result.pop("square") - result.pop("first") ** 2
        result["r2"] = 1 - result["loss"] / variance
        return result


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="regression", epochs=60, evaluate_splits=["val"], patience=15
    )
    config.dataloader.batch_size = 16
    config.optim = {"type": "adamw", "lr": 3e-3, "weight_decay": 0.05}
    config.checkpoint.keep_latest_k = 2
    config.parse()
    with DiabetesRunner(config) as runner:
        runner.train()
        runner.load_checkpoint("best")
        scores = runner.evaluate("test")["test"]
        runner.print(f"test: R2 {scores['r2']:.3f}, mean absolute error {scores['mae']:.1f}")
