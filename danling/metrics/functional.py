"""Common figures as `(sum, weight)`, so that they stay exact over batches and ranks."""

from __future__ import annotations

from torch import Tensor


def accuracy(pred: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return `(number correct, number counted)` of a classification.

    Args:
        pred: Scores of shape (N, C) or (N, ..., C) for targets of shape (N, ...), or (N, C, ...) as cross entropy takes them.
        target: Class indices.
        ignore_index: Targets that do not count.
    """
    if pred.ndim == target.ndim + 1:
        last = pred.shape[:-1] == target.shape
        pred = pred.argmax(-1 if last else 1)
    counted = target != ignore_index
    return ((pred == target) & counted).sum(), counted.sum()


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5) -> tuple[Tensor, float]:
    """Return `(number of targets among the k best scores, number of targets)`.

    Args:
        pred: Scores of shape (N, C).
        target: Class indices of shape (N,).
        k: How many scores count.
    """
    best = pred.topk(min(k, pred.shape[-1]), dim=-1).indices
    return (best == target.unsqueeze(-1)).any(-1).sum(), float(target.numel())


def mean_squared_error(pred: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return `(sum of squared errors, number of elements)`; `pred` takes the shape of `target`."""
    return (pred.reshape(target.shape).double() - target.double()).square().sum(), float(target.numel())


def mean_absolute_error(pred: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return `(sum of absolute errors, number of elements)`; `pred` takes the shape of `target`."""
    return (pred.reshape(target.shape).double() - target.double()).abs().sum(), float(target.numel())
