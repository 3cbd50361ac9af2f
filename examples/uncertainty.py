"""Regression with uncertainty: a mean and a standard deviation for each patient of `regression.py`, and how well they are calibrated.

python examples/uncertainty.py                            # 10 s of processor time
python examples/uncertainty.py --task.fixed true          # one standard deviation for all patients

It prints 1.014 nats a patient on the test set, and 91 % of the patients within intervals for 90 %. One standard deviation for all patients
gives 1.056 nats, and the mean and standard deviation of the training set 1.419.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from regression import load_patients
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss, softplus

import danling as dl

Z90 = 1.6449
"""Standard deviations on each side of the mean of a normal distribution within which 90 % of it is."""


class Network(nn.Module):
    """Predicts a mean and a variance.

    Args:
        fixed: Whether the variance is one number for all inputs.
    """

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.2))
        self.mean = nn.Linear(32, 1)
        self.spread: nn.Module | None = None if fixed else nn.Linear(32, 1)
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances, each of shape (B,), of inputs (B, 10)."""
        features = self.body(inputs)
        spread = self.offset if self.spread is None else self.offset + self.spread(features)[:, 0]
        mean = self.mean(features)[:, 0]
        return mean, (softplus(spread) + 1e-3).expand_as(mean)


class UncertaintyRunner(dl.Runner):
    """Minimises the negative log likelihood of a normal distribution, in units of the training set's standard deviation."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.datasets, *_ = load_patients()
        self.model = Network(self.config.task.fixed)
        # One value a sample: means over all samples of all ranks, however they are batched.
        self.metrics = {"inside90": inside, "width": lambda pred, target: 2 * Z90 * pred[1].sqrt()}

    def compute_loss(self, pred: Any, target: Tensor) -> Tensor:
        """Return the mean negative log likelihood, in nats."""
        mean, variance = pred
        return gaussian_nll_loss(mean, target, variance, full=True)


def inside(pred: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return, for each sample, whether the target is in the interval that 90 % of the targets should be in."""
    mean, variance = pred
    return ((target - mean).abs() <= Z90 * variance.sqrt()).float()


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="uncertainty", epochs=60, evaluate_splits=["val"], patience=15
    )
    config.task = {"fixed": False}
    config.dataloader.batch_size = 16
    config.optim = {"type": "adamw", "lr": 3e-3, "weight_decay": 0.05}
    config.checkpoint.keep_latest_k = 2
    config.parse()
    with UncertaintyRunner(config) as runner:
        runner.train()
        runner.load_checkpoint("best")
        scores = runner.evaluate("test")["test"]
        without = 0.5 * (1 + math.log(2 * math.pi))
        runner.print(
            f"test: {scores['loss']:.3f} nats a patient ({without:.3f} for the training set's mean and deviation), "
            f"{scores['inside90']:.0%} within intervals for 90 %, which are {scores['width']:.2f} deviations wide"
        )
