"""What a user may put into `runner.metrics`, as one thing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from danling.utils.protocols import ReductionDomain

from .meters import Meters


class MetricSet:
    """Metrics of an evaluation, exact over a domain.

    Accepts a callable `f(pred, target)` that returns a mean over the batch (0-dim), one value a sample (1-D), or `(sum, weight)`; an
    object with `update`, `compute` and `reset`, such as those of torchmetrics; or a mapping of these by name.

    Args:
        metrics: Metrics by name; a name of `""` stands for an object that names its own figures.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._functions = {name: metric for name, metric in metrics.items() if not hasattr(metric, "compute")}
        self._objects = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
        self._meters = Meters()

    @classmethod
    def wrap(cls, metrics: Any) -> MetricSet:
        """Return a `MetricSet` of whatever the user gave.

        Raises:
            ValueError: If it is none of the accepted kinds.
        """
        if metrics is None:
            return cls({})
        if hasattr(metrics, "compute"):
            return cls({_name_of(metrics): metrics})
        if isinstance(metrics, Mapping):
            for name, metric in metrics.items():
                _check(name, metric)
            return cls(dict(metrics))
        _check("metrics", metrics)
        return cls({_name_of(metrics): metrics})

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    def reset(self) -> None:
        """Forget everything."""
        self._meters.reset()
        for metric in self._objects.values():
            metric.reset()

    def update(self, pred: Any, target: Any, samples: float) -> None:
        """Take in one batch.

        Args:
            pred: Prediction of the batch.
            target: Its target.
            samples: Its number of real samples; a batch of none is left out.
        """
        if not samples:
            return
        for name, function in self._functions.items():
            total, weight = _as_totals(name, function(pred, target), samples)
            self._meters.add_totals(name, total, weight)
        for metric in self._objects.values():
            metric.update(pred, target)

    def compute(self, domain: ReductionDomain | None = None) -> dict[str, float]:
        """Return the figures over the domain, by name. Call on all its members."""
        result = self._meters.averages(domain)
        for name, metric in self._objects.items():
            result.update(_named(name, _compute_object(name, metric, domain)))
        return result


def _check(name: str, metric: Any) -> None:
    if not callable(metric) and not (hasattr(metric, "update") and hasattr(metric, "compute")):
        raise ValueError(
            f"Expected metric {name!r} to be a callable (pred, target) or an object with update, compute and reset. Received: "
            f"{metric!r} ({type(metric).__name__})."
        )


def _name_of(metric: Any) -> str:
    if type(metric).__name__ == "MetricCollection":
        return ""
    return getattr(metric, "name", None) or getattr(metric, "__name__", None) or type(metric).__name__.lower()


def _as_totals(name: str, value: Any, samples: float) -> tuple[Any, Any]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, Tensor) and value.ndim == 1:
        return value.double().sum(), float(value.numel())
    if isinstance(value, Tensor) and value.ndim > 1:
        raise ValueError(
            f"Expected metric {name!r} to return a mean, one value a sample, or (sum, weight). Received: a tensor of shape "
            f"{tuple(value.shape)}."
        )
    return value * samples, samples


def _named(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        prefix = f"{name}." if name and name != "metriccollection" else ""
        return {f"{prefix}{key}": float(item) for key, item in value.items()}
    if value is None:
        return {}
    if isinstance(value, Tensor) and value.ndim == 1 and value.numel() > 1:
        return {f"{name}.{i}": float(item) for i, item in enumerate(value)}
    return {name: float(value)}


def _compute_object(name: str, metric: Any, domain: ReductionDomain | None) -> Any:
    """Compute a metric object over the domain by merging the states of all members on every one of them.

    The object's own synchronisation is left out: it hangs or fails where a rank has seen nothing.
    """
    parts = list(metric.values()) if type(metric).__name__ == "MetricCollection" else [metric]
    if domain is None or domain.size == 1:
        return _compute_alone(metric) if any(_has_seen(part) for part in parts) else None
    if type(metric).__name__ == "MetricCollection":
        merged = {key: _merge(key, part, domain) for key, part in metric.items(keep_base=True, copy_state=True)}
        seen = {key: part for key, part in merged.items() if part is not None}
        result: dict[str, Any] = {}
        for key, part in seen.items():
            value = _compute_alone(part)
            result.update(value if isinstance(value, Mapping) else {metric._set_name(key): value})
        return result
    part = _merge(name, metric, domain)
    return None if part is None else _compute_alone(part)


def _has_seen(metric: Any) -> bool:
    return bool(getattr(metric, "_update_count", 1))


def _compute_alone(metric: Any) -> Any:
    if hasattr(metric, "sync_on_compute"):
        before, metric.sync_on_compute = metric.sync_on_compute, False
        try:
            return metric.compute()
        finally:
            metric.sync_on_compute = before
    return metric.compute()


def _merge(name: str, metric: Any, domain: ReductionDomain) -> Any:
    if not hasattr(metric, "merge_state"):
        raise ValueError(
            f"Expected metric {name!r} to have merge_state, so that it can be computed over {domain.size} ranks. Received: "
            f"{type(metric).__name__}. Use a torchmetrics object, or a callable that returns (sum, weight)."
        )
    mine = metric.clone() if hasattr(metric, "clone") else copy.deepcopy(metric)
    if hasattr(mine, "to"):
        mine = mine.to("cpu")
    gathered = [member for member in domain.gather_objects(mine if _has_seen(mine) else None) if member is not None]
    if not gathered:
        return None
    merged = gathered[0]
    for other in gathered[1:]:
        merged.merge_state(other)
    return merged
