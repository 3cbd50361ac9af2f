"""Predictions by sample: what a step returns for a batch is taken apart, and put into the order of the dataset over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from danling.utils.protocols import ReductionDomain

from .batches import prediction_of


def split_by_sample(pred: object, samples: int, parts: Sequence[int] | None = None) -> list[object]:
    """Return the prediction of a batch as a list with an item for each sample, on the CPU.

    A tensor is taken apart along its first dimension, into plain numbers where a sample has a single one; a list by its items; a tuple
    of such, several outputs of a model, into a tuple for each sample; a mapping into one for each sample, of the entries that have as
    many items as the batch has samples. Anything else is one item for the whole batch. Where each sample has several parts, as a graph
    has nodes, a tensor with a row for each part is taken apart into a tensor for each sample, and one with as many rows as neither, such as
    one for each edge, is left whole.

    Args:
        pred: What the step returned.
        samples: Samples of the batch; padding behind them is left out, and a batch without any has no predictions.
        parts: How many parts each sample has, `None` where samples have none.
    """
    if not samples:
        return []
    if not isinstance(pred, (Mapping, tuple)):
        pred = prediction_of(pred)
    if isinstance(pred, Tensor) and parts is not None and pred.ndim and len(pred) == sum(parts) != len(parts):
        whole = pred.detach().cpu()
        of_samples: list[object] = [whole[end - count : end] for count, end in zip(parts, accumulate(parts))]
        return of_samples[:samples]
    if isinstance(pred, Tensor) and parts is not None and pred.ndim and len(pred) != len(parts):
        return [pred.detach().cpu()]
    if isinstance(pred, Tensor):
        rows = pred.detach().cpu()[:samples]
        has_single_number = rows.ndim == 1 or (rows.ndim == 2 and rows.shape[1] == 1)
        return rows.flatten().tolist() if has_single_number else list(rows.unbind(0))
    if isinstance(pred, Mapping):
        columns = {
            name: split_by_sample(value, samples, parts)
            for name, value in pred.items()
            if _has_rows(value, samples, parts)
        }
        return [dict(zip(columns, row)) for row in zip(*columns.values())] if columns else [pred]
    if isinstance(pred, tuple) and pred and all(_has_rows(part, samples, parts) for part in pred):
        return list(zip(*(split_by_sample(part, samples, parts) for part in pred)))
    return list(pred)[:samples] if isinstance(pred, list) else [pred]


def gather_predictions(batches: Sequence[Sequence[object]], domain: ReductionDomain) -> list[object]:
    """Return the predictions of all ranks in the order of the dataset, the same on all of them.

    Ranks take the batches of a split in turn, so the first batches of all ranks come before the second ones.

    Args:
        batches: The predictions of this rank, a sequence for each of its batches.
        domain: The ranks that read different data.
    """
    ranks: list[Sequence[Sequence[Any]]] = domain.gather_objects(batches)
    rounds = max(map(len, ranks), default=0)
    return [item for turn in range(rounds) for mine in ranks if turn < len(mine) for item in mine[turn]]


def _has_rows(value: Any, samples: int, parts: Sequence[int] | None) -> bool:
    is_rows = isinstance(value, Tensor) and value.ndim > 0
    if not (is_rows or isinstance(value, list)):
        return False
    return len(value) == samples or (is_rows and parts is not None and len(value) == sum(parts))
