from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MulticlassPrecision

from danling.metrics import MetricSet, accuracy


class Largest:
    """Keeps more than sums: the largest prediction."""

    def __init__(self) -> None:
        self.value = -1.0

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.value = max(self.value, float(pred.max()))

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.value = -1.0


class Ranks:
    """A domain of several ranks for checks that come before any communication."""

    rank, size = 0, 2

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("communicated")

    all_reduce = gather_objects = broadcast_object = barrier = _refuse


def _error(pred: Tensor, target: Tensor) -> Tensor:
    return (pred - target).abs()


def _updated(metrics: Any, sizes: tuple[int, ...] = (3, 5, 1)) -> tuple[MetricSet, Tensor, Tensor]:
    wrapped = MetricSet.wrap(metrics)
    pred, target = torch.rand(sum(sizes)), torch.randint(0, 2, (sum(sizes),))
    for p, t in zip(pred.split(list(sizes)), target.split(list(sizes))):
        wrapped.update(p, t, len(p))
    return wrapped, pred, target


@pytest.mark.parametrize(
    "metric",
    [
        _error,
        lambda pred, target: _error(pred, target).mean(),
        lambda pred, target: float(_error(pred, target).mean()),
        lambda pred, target: (_error(pred, target).sum(), pred.numel()),
        lambda pred, target: _error(pred, target).numpy(),
        nn.L1Loss(),
    ],
    ids=["values", "mean", "float", "totals", "numpy", "criterion"],
)
def test_a_callable_may_return_values_a_mean_or_totals(metric: Any) -> None:
    wrapped, pred, target = _updated({"error": metric})
    assert wrapped.compute()["error"] == pytest.approx(
        float(_error(pred.double(), target).mean()), abs=1e-6
    )


def test_names() -> None:
    assert list(_updated(_error)[0].compute()) == ["_error"]
    assert list(_updated(BinaryAUROC())[0].compute()) == ["binaryauroc"]
    assert list(_updated({"auc": BinaryAUROC(), "l": Largest()})[0].compute()) == ["auc", "l"]
    assert list(_updated(nn.ModuleDict({"auc": BinaryAUROC()}))[0].compute()) == ["auc"]
    collection = torchmetrics.MetricCollection([BinaryAUROC()], prefix="bin_")
    assert list(_updated(collection)[0].compute()) == ["bin_BinaryAUROC"]
    assert list(_updated({"all": collection})[0].compute()) == ["all.bin_BinaryAUROC"]


def test_name_of_the_loss_is_refused_also_from_an_object_with_its_own_names() -> None:
    with pytest.raises(ValueError, match="a metric called 'loss'"):
        MetricSet.wrap({"loss": _error})
    wrapped, _, _ = _updated(torchmetrics.MetricCollection({"loss": BinaryAUROC()}))
    with pytest.raises(ValueError, match="a metric called 'loss'"):
        wrapped.compute()


def test_several_values_of_one_metric_are_numbered() -> None:
    wrapped = MetricSet.wrap(
        {"f1": MulticlassF1Score(3, average=None), "table": torchmetrics.ConfusionMatrix("binary")}
    )
    wrapped.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), 3)
    assert wrapped.compute() == {
        "f1.0": pytest.approx(2 / 3),
        "f1.1": pytest.approx(2 / 3),
        "f1.2": 0.0,
        "table.0.0": 1.0,
        "table.0.1": 1.0,
        "table.1.0": 0.0,
        "table.1.1": 1.0,
    }


def test_set_without_updates_computes_nothing() -> None:
    empty = MetricSet.wrap(None)
    empty.update(torch.ones(2), torch.ones(2), 2)
    assert not empty and empty.compute() == {}
    metrics = {"auc": BinaryAUROC(), "error": _error, "max": Largest()}
    wrapped = MetricSet.wrap(metrics)
    assert wrapped.compute() == {}
    wrapped.update(torch.rand(2), torch.tensor([0, 1]), 0)
    assert wrapped.compute() == {}
    assert len(_updated(metrics)[0].compute()) == 3
    again, _, _ = _updated(metrics)
    again.reset()
    assert again.compute() == {}


def test_computing_leaves_the_states_alone() -> None:
    metric = MulticlassPrecision(2)
    wrapped, pred, target = _updated({"p": lambda p, t: 1.0, "m": BinaryAUROC()})
    assert wrapped.compute() == wrapped.compute()
    half = MetricSet.wrap({"m": metric})
    half.update((pred > 0.5).long(), target, 9)
    first = half.compute()
    half.update((pred > 0.5).long(), target, 9)
    assert half.compute() == first
    assert metric.sync_on_compute and metric._to_sync


@pytest.mark.parametrize("given", [3, BinaryAUROC, [accuracy], "acc"])
def test_object_without_the_interface_of_a_metric_is_refused(given: Any) -> None:
    for metrics in (given, {"m": given}):
        with pytest.raises(
            ValueError,
            match=r"a callable \(pred, target\) or an object with update, compute and reset",
        ):
            MetricSet.wrap(metrics)


@pytest.mark.parametrize("value", [torch.ones(2, 2), torch.ones(3), None, {"a": 1.0}, "x"])
def test_impossible_results_of_a_callable_are_refused(value: Any) -> None:
    with pytest.raises(
        ValueError, match="metric 'm' to return a mean, one value for each of 2 samples, or"
    ):
        MetricSet.wrap({"m": lambda pred, target: value}).update(torch.ones(2), torch.ones(2), 2)


def test_unmergeable_metric_is_refused_before_any_work() -> None:
    with pytest.raises(
        ValueError, match="metric 'max' to have torchmetrics states or merge_state.* over 2 ranks"
    ):
        MetricSet.wrap({"acc": accuracy, "max": Largest()}, domain=Ranks())
    MetricSet.wrap({"acc": accuracy, "auc": BinaryAUROC()}, domain=Ranks())


@pytest.mark.parametrize(
    "metric",
    [
        accuracy,
        lambda pred, target: pred.argmax(-1) == target,
        lambda pred, target: pred.numpy() == target,
        Largest(),
    ],
    ids=["raises", "compares", "compares arrays", "object"],
)
def test_metric_without_its_target_names_the_source_of_targets(metric: Any) -> None:
    if isinstance(metric, Largest):
        metric.update = lambda pred, target: target.max()  # type: ignore[method-assign]
    with pytest.raises(
        ValueError,
        match=r"Expected a target for metric 'acc'.*\(input, target\), or the key 'target'",
    ):
        MetricSet.wrap({"acc": metric}).update(torch.rand(4, 3), None, 4)


def test_metric_without_a_target_argument_gets_none() -> None:
    metrics = MetricSet.wrap({"positive": lambda pred, _: (pred > 0).double()})
    metrics.update(torch.tensor([1.0, -1.0, 2.0, 3.0]), None, 4)
    assert metrics.compute() == {"positive": 0.75}
