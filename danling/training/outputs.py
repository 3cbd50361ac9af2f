"""Reading what a model returns: a tensor, or a mapping or an object with `loss` and `logits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def model_loss(pred: object) -> Tensor | None:
    """Return the `loss` that a model put into its prediction, a mapping or an object; `None` when there is none."""
    found = _part(pred, "loss")
    return found if isinstance(found, Tensor) else None


def prediction_of(pred: object) -> object:
    """Return what a criterion and metrics are handed of a prediction: its `logits` where it has `loss` and `logits`, else all of it.

    Args:
        pred: What the model returned. The `loss` may be `None`, as that of a model which was given no labels.
    """
    if isinstance(pred, Tensor) or not (_has(pred, "loss") and _has(pred, "logits")):
        return pred
    return _part(pred, "logits")


def _part(pred: object, name: str) -> Any:
    if isinstance(pred, Mapping) and name in pred:
        return pred[name]
    return getattr(pred, name, None)


def _has(pred: object, name: str) -> bool:
    return (isinstance(pred, Mapping) and name in pred) or hasattr(pred, name)
