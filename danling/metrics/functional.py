"""Common metrics as `(sum, weight)`, so that they stay exact over batches and ranks.

Some metrics are functions of a mean: the perplexity of a language model is `math.exp(result["loss"])`, the root mean squared error
`math.sqrt(result["mse"])`; compute them in an overridden `summarize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from danling.utils.tensors import as_signed


def accuracy(
    pred: Tensor, target: Tensor, ignore_index: int = -100, *, dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(number correct, number counted)` of a classification.

    Args:
        pred: Class scores of shape (N, C), (N, ..., C) or (N, C, ...) for targets of shape (N, ...), or classes of its shape.
        target: Class indices.
        ignore_index: Targets that do not count.
        dim: Dimension of the classes; needed only where both the second and the last one fit.

    Returns:
        Two 0-dim integer tensors on the device of `pred`.

    Raises:
        ValueError: If the shapes do not fit, or fit in two ways.
    """
    target = as_signed(target)
    has_scores = pred.shape != target.shape
    if has_scores:
        pred = pred.argmax(_class_dim(pred, target) if dim is None else dim)
    elif pred.is_floating_point():
        raise ValueError(
            f"Expected class scores with one dimension more than the target, or predicted classes. Received: floating pred of shape "
            f"{tuple(pred.shape)}. For two classes and one score, pass (pred > threshold).long()."
        )
    counted, correct = target != ignore_index, pred == target
    # The place of the best score is never negative, so it never equals a target that is ignored for being so.
    if not has_scores or ignore_index >= 0:
        correct &= counted
    return torch.count_nonzero(correct), torch.count_nonzero(counted)


def _class_dim(pred: Tensor, target: Tensor) -> int:
    # The usual case first: it is asked for each batch.
    if pred.ndim == 2 and pred.shape[:1] == target.shape and pred.shape[1] > 1:
        return 1
    fitting = [
        d
        for d in sorted({1, pred.ndim - 1})
        if (*pred.shape[:d], *pred.shape[d + 1 :]) == tuple(target.shape)
    ]
    if len(fitting) != 1 or pred.shape[fitting[0]] < 2:
        ways = "in two ways; pass dim" if len(fitting) > 1 else "in no way, or one class only"
        raise ValueError(
            f"Expected scores of several classes, (N, C, ...) or (N, ..., C), for a target (N, ...). Received: pred of shape "
            f"{tuple(pred.shape)} and target of shape {tuple(target.shape)}, which fit {ways}."
        )
    return fitting[0]


def top_k_accuracy(
    pred: Tensor, target: Tensor, k: int = 5, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return `(number of targets among the k best scores, number counted)`.

    Args:
        pred: Class scores of shape (..., C).
        target: Class indices of shape (...).
        k: How many scores count; all of them where there are fewer.
        ignore_index: Targets that do not count.
    """
    target = as_signed(target)
    # With fewer classes than k, every target is among the best.
    best = pred.topk(min(k, pred.shape[-1]), dim=-1).indices
    counted = target != ignore_index
    correct = (best == target.unsqueeze(-1)).any(-1) & counted
    return torch.count_nonzero(correct), torch.count_nonzero(counted)


def mean_squared_error(pred: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return `(sum of squared errors, number of elements)`; `pred` takes the shape of `target`."""
    return (pred.reshape(target.shape).double() - target.double()).square().sum(), float(
        target.numel()
    )


def mean_absolute_error(pred: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return `(sum of absolute errors, number of elements)`; `pred` takes the shape of `target`."""
    return (pred.reshape(target.shape).double() - target.double()).abs().sum(), float(
        target.numel()
    )
