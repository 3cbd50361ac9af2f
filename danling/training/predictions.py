"""Predictions by sample: what a step returns for a batch is taken apart, and put into the order of the dataset over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from danling.utils.protocols import ReductionDomain

from .outputs import prediction_of


def split_by_sample(pred: object, samples: int) -> list[object]:
    """Return the prediction of a batch as a list with an item for each sample, on the CPU.

    A tensor is taken apart along its first dimension, into plain numbers where a sample has a single one; a list by its items; a tuple
    of such, several outputs of a model, into a tuple for each sample; a mapping into one for each sample, of the entries that have as
    many items as the batch has samples. Anything else is one item for the whole batch.

    Args:
        pred: What the step returned.
        samples: Samples of the batch; padding behind them is left out, and a batch without any has no predictions.
    """
    if not samples:
        return []
    if not isinstance(pred, (Mapping, tuple)):
        pred = prediction_of(pred)
    if isinstance(pred, Tensor):
        rows = pred.detach().cpu()[:samples]
        has_single_number = rows.ndim == 1 or (rows.ndim == 2 and rows.shape[1] == 1)
        return rows.flatten().tolist() if has_single_number else list(rows.unbind(0))
    if isinstance(pred, Mapping):
        columns = {name: split_by_sample(value, samples) for name, value in pred.items() if _has_rows(value, samples)}
        return [dict(zip(columns, row)) for row in zip(*columns.values())] if columns else [pred]
    if isinstance(pred, tuple) and pred and all(_has_rows(part, samples) for part in pred):
        return list(zip(*(split_by_sample(part, samples) for part in pred)))
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


def _has_rows(value: Any, samples: int) -> bool:
    is_list = isinstance(value, list)
    return (is_list or (isinstance(value, Tensor) and value.ndim > 0)) and len(value) == samples
