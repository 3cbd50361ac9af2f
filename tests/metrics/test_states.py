"""Evaluation over real processes equals scikit-learn's or torch's figures on the gathered data (guarantee G9)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from support.processes import run_processes
from torch import Tensor
from torchmetrics import classification, regression, wrappers

from danling.distributed import Domain
from danling.metrics import Meters, MetricSet, accuracy

_CLASSES = 3


class Spread:
    """A user's own object with `merge_state`: no sum of its own over the ranks' figures gives the whole's."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.low, self.high = min(self.low, float(pred.min())), max(self.high, float(pred.max()))

    def merge_state(self, other: Spread) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def compute(self) -> float:
        return self.high - self.low

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class Binary(torchmetrics.Metric):
    """A user's own torchmetrics object with a list and a maximum; refuses torchmetrics' own merging."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)
        self.add_state("top", default=torch.tensor(-math.inf), dist_reduce_fx="max")

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.seen.append(target)
        self.top = torch.maximum(self.top, pred.max())

    def compute(self) -> Tensor:
        return torch.cat(self.seen).double().mean() + self.top.double()


def _data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, _CLASSES, generator=generator), torch.randint(
        0, _CLASSES, (samples,), generator=generator
    )


def _metrics() -> dict[str, Any]:
    f1 = classification.MulticlassF1Score(_CLASSES, average="macro")
    return {
        "acc": accuracy,
        "confidence": lambda pred, target: pred.softmax(-1).amax(-1),
        "auroc": classification.MulticlassAUROC(_CLASSES),
        "f1": f1,
        "sum": f1 + classification.MulticlassAccuracy(_CLASSES, average="micro"),
        "several": torchmetrics.MetricCollection(
            [
                classification.MulticlassPrecision(_CLASSES),
                classification.MulticlassRecall(_CLASSES),
                classification.MulticlassAUROC(_CLASSES),
            ]
        ),
        "each": wrappers.ClasswiseWrapper(classification.MulticlassRecall(_CLASSES, average=None)),
        "spread": Spread(),
        "own": Binary(),
    }


def _evaluate(samples: int, batch_size: int, shares: list[tuple[int, int]]) -> dict[str, float]:
    domain = Domain()
    begin, end = shares[domain.rank]
    pred, target = (part[begin:end] for part in _data(samples))
    metrics, totals = MetricSet.wrap(_metrics(), domain=domain), Meters()
    for p, t in zip(pred.split(batch_size), target.split(batch_size)):
        if len(p):
            metrics.update(p, t, len(p))
            totals.update({"loss": torch.nn.functional.cross_entropy(p.double(), t)}, len(p))
    first = {**totals.averages(domain), **metrics.compute(domain)}
    second = {**totals.averages(domain), **metrics.compute(domain)}
    assert first == second, "computing changed the states"
    return first


def _expected(samples: int) -> dict[str, float]:
    # Here, so that the processes need not load it.
    from sklearn import metrics as reference

    pred, target = _data(samples)
    classes = pred.argmax(-1)
    precision, recall, f1, _ = reference.precision_recall_fscore_support(
        target, classes, average="macro"
    )
    share = pred.softmax(-1)
    auroc = reference.roc_auc_score(
        target, share.double() / share.double().sum(-1, keepdim=True), multi_class="ovr"
    )
    correct = reference.accuracy_score(target, classes)
    each = reference.recall_score(target, classes, average=None)
    loss = float(torch.nn.functional.cross_entropy(pred.double(), target))
    return {
        "loss": loss,
        "acc": correct,
        "confidence": float(share.amax(-1).double().mean()),
        "auroc": auroc,
        "f1": f1,
        "sum": f1 + correct,
        "several.MulticlassPrecision": precision,
        "several.MulticlassRecall": recall,
        "several.MulticlassAUROC": auroc,
        **{f"each.multiclassrecall_{i}": each[i] for i in range(_CLASSES)},
        "spread": float(pred.max() - pred.min()),
        "own": float(target.double().mean()) + float(pred.max()),
    }


def _even(samples: int, world_size: int) -> list[tuple[int, int]]:
    cuts = [samples * rank // world_size for rank in range(world_size + 1)]
    return [(cuts[rank], cuts[rank + 1]) for rank in range(world_size)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 100), (2, 4), (3, 4)])
def test_figures_equal_the_whole_sets_in_every_layout(world_size: int, batch_size: int) -> None:
    results = run_processes(
        _evaluate,
        47,
        batch_size,
        _even(47, world_size),
        world_size=world_size,
        init_process_group=world_size > 1,
    )
    assert results[0] == pytest.approx(_expected(47), abs=1e-6)
    assert all(result == results[0] for result in results)
    # What is no mean follows from one that is exact.
    assert math.exp(results[0]["loss"]) == pytest.approx(math.exp(_expected(47)["loss"]), rel=1e-12)


@pytest.mark.parametrize("shares", [[(0, 0), (0, 47)], [(0, 9), (9, 9), (9, 47)]])
def test_an_empty_shard_does_not_hang_and_weighs_nothing(shares: list[tuple[int, int]]) -> None:
    results = run_processes(
        _evaluate, 47, 8, shares, world_size=len(shares), init_process_group=True
    )
    assert results[0] == pytest.approx(_expected(47), abs=1e-6)
    assert all(result == results[0] for result in results)


def _statistics(shares: list[tuple[int, int]]) -> dict[str, float]:
    domain = Domain()
    generator = torch.Generator().manual_seed(1)
    pred = torch.randn(31, generator=generator)
    target = 0.5 * pred + torch.randn(31, generator=generator)
    metrics = MetricSet.wrap(
        {
            "pearson": regression.PearsonCorrCoef(),
            "r2": regression.R2Score(),
            "spearman": regression.SpearmanCorrCoef(),
        },
        domain=domain,
    )
    begin, end = shares[domain.rank]
    for i in range(begin, end, 5):
        metrics.update(pred[i : min(i + 5, end)], target[i : min(i + 5, end)], min(5, end - i))
    return metrics.compute(domain)


@pytest.mark.parametrize("shares", [[(0, 11), (11, 20), (20, 31)], [(0, 31), (0, 0), (0, 0)]])
def test_metrics_with_reductions_of_their_own(shares: list[tuple[int, int]]) -> None:
    alone = run_processes(_statistics, [(0, 31)], world_size=1)[0]
    assert run_processes(_statistics, shares, world_size=3, init_process_group=True)[
        0
    ] == pytest.approx(alone, abs=1e-5)
