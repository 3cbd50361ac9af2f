"""What a user may put into `runner.metrics`, as one thing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from danling.utils.protocols import ReductionDomain

from .meters import Meters
from .states import can_merge, compute_metric, holders, load_state, merged_state


class MetricSet:
    """Metrics of an evaluation, exact over a domain.

    A metric is a callable `f(pred, target)` that returns a mean over the batch (a number), one value a sample (1-D), or
    `(sum, weight)`; or an object with `update(pred, target)`, `compute()` and `reset()`, such as those of torchmetrics. Over
    several ranks an object must hold its data in torchmetrics states, or have `merge_state(other)`, which takes in another
    object of its class.

    Args:
        metrics: Metrics by name; a name of `""` stands for an object whose metrics have names of their own.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        for name, metric in metrics.items():
            _check_kind(name, metric)
        self._functions = {name: metric for name, metric in metrics.items() if not hasattr(metric, "compute")}
        self._objects = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
        self._meters = Meters()
        self._has_seen = False

    @classmethod
    def wrap(
        cls,
        metrics: object,
        *,
        domain: ReductionDomain | None = None,
        device: torch.device | None = None,
        exact: bool = False,
    ) -> MetricSet:
        """Return a `MetricSet` of whatever the user gave: `None`, one metric, or a mapping of metrics by name.

        Args:
            metrics: The user's.
            domain: Ranks that metrics will be computed over, where they are known already.
            device: Where predictions will be; objects that can be moved go there.
            exact: Whether means of callables have the same bits at any number of ranks.

        Raises:
            ValueError: If it is none of the accepted kinds, or cannot be computed over the domain.
        """
        if isinstance(metrics, MetricSet):
            wrapped = metrics
        elif metrics is None:
            wrapped = cls({})
        elif isinstance(metrics, (Mapping, nn.ModuleDict)) and not hasattr(metrics, "compute"):
            wrapped = cls(dict(metrics.items()))
        else:
            _check_kind("metrics", metrics)
            wrapped = cls({_name_of(metrics): metrics})
        wrapped.check(domain)
        wrapped._meters.exact = exact
        return wrapped.to(device) if device is not None else wrapped

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    def check(self, domain: ReductionDomain | None) -> None:
        """Raise a `ValueError` when a metric cannot be computed over the domain."""
        for name, metric in self._objects.items():
            if domain is not None and domain.size > 1 and not can_merge(metric):
                raise ValueError(
                    f"Expected metric {name or 'metrics'!r} to hold torchmetrics states or to have merge_state(other), so that it can "
                    f"be computed over {domain.size} ranks. Received: {metric!r} ({type(metric).__name__}). Derive it from "
                    "torchmetrics.Metric, add merge_state, or use a callable that returns (sum, weight)."
                )

    def to(self, device: torch.device) -> MetricSet:
        """Move the objects that can be moved, and return this set."""
        for name, metric in self._objects.items():
            if isinstance(metric, nn.Module):
                self._objects[name] = metric.to(device)
        return self

    def reset(self) -> None:
        """Forget everything."""
        self._meters.reset()
        self._has_seen = False
        for metric in self._objects.values():
            metric.reset()

    def update(self, pred: object, target: object, samples: float) -> None:
        """Take in one batch.

        Args:
            pred: Prediction of the batch.
            target: Its target.
            samples: Its number of real samples, which a mean over the batch is weighted by; a batch of none is left out.

        Raises:
            ValueError: If a callable returns something else than `MetricSet` says, or a metric cannot do without the target that
                the batch lacks.
        """
        if not samples:
            return
        self._has_seen = True
        for name, function in self._functions.items():
            alone = partial(_value_of, function)
            value = function(pred, target) if target is not None else _without_target(name, alone, pred)
            total, weight = _as_totals(name, value, samples)
            self._meters.add_totals(name, total, weight)
        for name, metric in self._objects.items():
            if target is not None:
                metric.update(pred, target)
            else:
                _without_target(name or "metrics", metric.update, pred)

    def compute(self, domain: ReductionDomain | None = None) -> dict[str, float]:
        """Return the metrics over the domain, by name, the same on all its members. Call on all of them.

        A metric that no member has data for is left out. Several values of one metric are called `name.key` or `name.0`.

        Raises:
            ValueError: If a metric cannot be computed over the domain, or is no number.
        """
        self.check(domain)
        return self._meters.averages(domain) | self._compute_objects(domain)

    def _compute_objects(self, domain: ReductionDomain | None) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, metric in self._objects.items():
            value = compute_metric(metric, domain, seen=self._has_seen)
            if value is not None:
                result.update(_figures(name, value))
        return result


class TrainMetrics(MetricSet):
    """Metrics of what is trained. The means of callables are kept by the meters of the run; objects are copies, which no evaluation resets.

    Args:
        metrics: Those of the run.
        names: Which of them; `True` is all.
        meters: Those of the run, which are saved, logged and reset with the loss.

    Raises:
        ValueError: If there is no metric of a name, or an object holds its data in another way than torchmetrics does.
    """

    def __init__(self, metrics: MetricSet, names: bool | Sequence[str], meters: Meters) -> None:
        known = {**metrics._functions, **metrics._objects}
        missing = [name for name in names if name not in known] if not isinstance(names, bool) else []
        if missing or not known:
            raise ValueError(
                f"Expected train_metrics to name metrics of self.metrics, {sorted(known)}. Received: train_metrics={names!r}. Set "
                "self.metrics in __init__, or leave train_metrics out."
            )
        chosen = {name: known[name] for name in (known if isinstance(names, bool) else names)}
        other = next(
            (name for name, metric in chosen.items() if name in metrics._objects and not holders(metric)), None
        )
        if other is not None:
            raise ValueError(
                f"Expected metrics of training that are callables or hold torchmetrics states, so that they can be saved within a pass. "
                f"Received: {other!r}, a {type(chosen[other]).__name__}. Name the others in train_metrics."
            )
        super().__init__(
            {name: copy.deepcopy(metric) if name in metrics._objects else metric for name, metric in chosen.items()}
        )
        self._meters = meters
        self.reset()

    def reset(self) -> None:
        """Forget what the objects have seen; the meters of the run are reset with the loss."""
        for metric in self._objects.values():
            metric.reset()

    def compute(self, domain: ReductionDomain | None = None) -> dict[str, float]:
        """Return the metrics of objects over the domain; see `MetricSet.compute`. Call on all members."""
        self.check(domain)
        return self._compute_objects(domain)

    def state_dict(self, domain: ReductionDomain | None = None) -> dict[str, Any]:
        """Return what the objects have seen on all members, as tensors and plain values. Call on all members."""
        return {name: merged_state(metric, domain) for name, metric in self._objects.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on one member; the others load an empty mapping."""
        self.reset()
        for name, metric in self._objects.items():
            load_state(metric, state.get(name, {}))

    def remember(self) -> Callable[[], None]:
        """Remember what the objects have seen, and return what puts it back. No communication."""
        kept = copy.deepcopy(self._objects)

        def put_back() -> None:
            self._objects = copy.deepcopy(kept)

        return put_back


def _check_kind(name: str, metric: Any) -> None:
    methods = all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))
    if inspect.isclass(metric) or not (methods or callable(metric)):
        raise ValueError(
            f"Expected metric {name!r} to be a callable (pred, target) or an object with update, compute and reset. Received: "
            f"{metric!r} ({type(metric).__name__})."
        )


def _without_target(name: str, metric: Callable[[object, object], object], pred: object) -> object:
    """Call a metric with a target of `None`; what it cannot do without is said to be the target."""
    try:
        return metric(pred, None)
    except Exception as error:
        raise ValueError(
            f"Expected a target for metric {name!r}: the second part of a batch (input, target), or the key 'target' of a batch that "
            f"is a mapping. Received: a batch without one, so that the metric was called with None ({type(error).__name__}: {error}). "
            "Return the target from the dataset or the collate function, beside the input."
        ) from error


def _value_of(function: Callable[[object, object], object], pred: object, target: None) -> object:
    """Return what a function makes of a prediction alone, which must not be the outcome of a comparison with `None`."""
    value = function(pred, target)
    if _is_truth(value):
        raise TypeError(f"the metric compared with None and returned {value!r}")
    return value


def _is_truth(value: object) -> bool:
    # `prediction == None` is False, and an array of it in NumPy.
    return isinstance(value, bool) or (not isinstance(value, Tensor) and str(getattr(value, "dtype", "")) == "bool")


def _name_of(metric: Any) -> str:
    if isinstance(metric, nn.ModuleDict):
        return ""
    named = getattr(metric, "name", None) or getattr(metric, "__name__", None)
    return named if isinstance(named, str) else type(metric).__name__.lower()


def _as_totals(name: str, value: object, samples: float) -> tuple[Any, Any]:
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.ndim == 1 and value.numel() == samples:
        return value.double().sum(), samples
    if isinstance(value, Tensor) and value.ndim == 0:
        # Before the product: a half-precision one would be rounded.
        return value.detach().double() * samples, samples
    if isinstance(value, (int, float)):
        return value * samples, samples
    shape = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"{value!r} ({type(value).__name__})"
    )
    raise ValueError(
        f"Expected metric {name!r} to return a mean, one value for each of {samples:g} samples, or (sum, weight). Received: {shape}. "
        "Return (values.sum(), values.numel()) for values of something else than samples."
    )


def _figures(name: str, value: object) -> dict[str, float]:
    return {".".join(part for part in path if part): figure for path, figure in _flat((name,), value)}


def _flat(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], float]]:
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat((*path, str(key)), item)
    elif isinstance(value, Tensor) and value.numel() > 1:
        for i, item in enumerate(value.tolist() if value.ndim == 1 else value):
            yield from _flat((*path, str(i)), item)
    elif hasattr(value, "__float__"):
        yield path, float(value)
    else:
        raise ValueError(
            f"Expected metric {'.'.join(path)!r} to compute numbers. Received: {type(value).__name__}. Compute curves and the like in "
            "an overridden `summarize`."
        )
