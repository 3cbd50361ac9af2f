"""What a user may put into `runner.metrics`, as one thing."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from danling.distributed import Domain
from danling.utils.tensors import has_strided_values, is_plain_tensor

from .meters import Meters
from .objects import (
    CPU,
    attributes_of,
    compute_metric,
    count_of,
    holders,
    is_attribute,
    is_same,
    load_state,
    merged_state,
    moved,
    owners_of,
    parts_of,
)

_RANDOM_PREDICTIONS = 4
"""One alone may agree by chance with the mean over its halves."""
_MOST_DRAWN = 2**22
"""Most values of a random prediction: that of a language model may take gigabytes."""


class MetricSet:
    """Metrics of an evaluation, exact over a domain.

    A metric is a callable `f(pred, target)` that returns a mean over the batch (a number), one value a sample (1-D), or
    `(sum, weight)`; or an object with `update(pred, target)`, `compute()` and `reset()`, such as those of torchmetrics. Over
    several ranks an object must hold its data in torchmetrics states, or have `merge_state(other)`, which takes in another
    object of its class.

    Args:
        metrics: Metrics by name; a name of `""` is for an object that names its metrics itself.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        _check_names(metrics)
        for name, metric in metrics.items():
            methods = all(
                callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")
            )
            if inspect.isclass(metric) or not (methods or callable(metric)):
                raise ValueError(
                    f"Expected metric {name!r} to be a callable (pred, target) or an object with update, compute and reset. Received: "
                    f"{metric!r} ({type(metric).__name__})."
                )
        self._functions = {
            name: metric for name, metric in metrics.items() if not hasattr(metric, "compute")
        }
        self._objects = {
            name: metric for name, metric in metrics.items() if hasattr(metric, "compute")
        }
        self._begun = {name: attributes_of(metric) for name, metric in self._objects.items()}
        self._meters = Meters()
        self._has_seen = False

    @classmethod
    def wrap(
        cls,
        metrics: object,
        *,
        domain: Domain | None = None,
        device: torch.device | None = None,
        exact: bool = False,
    ) -> MetricSet:
        """Return a `MetricSet` of whatever the user gave: `None`, one metric, or a mapping of metrics by name."""
        wrapped = metrics if isinstance(metrics, MetricSet) else cls(metrics_by_name(metrics))
        wrapped._meters.exact = exact
        # The library gathers states itself; from an object without them it could not.
        for name, metric in wrapped._objects.items():
            mergeable = bool(holders(metric)) or callable(getattr(metric, "merge_state", None))
            if domain is not None and domain.size > 1 and not mergeable:
                raise ValueError(
                    f"Expected metric {name or 'metrics'!r} to have torchmetrics states or merge_state(other), so that it can "
                    f"be computed over {domain.size} ranks. Received: {metric!r} ({type(metric).__name__}). Derive it from "
                    "torchmetrics.Metric, add merge_state, or use a callable that returns (sum, weight)."
                )
            if device is not None and isinstance(metric, nn.Module):
                wrapped._objects[name] = metric.to(device)
        return wrapped

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    @property
    def has_objects(self) -> bool:
        """Whether there are metrics other than callables."""
        return bool(self._objects)

    def reset(self) -> None:
        """Forget everything."""
        self._meters.reset()
        self._has_seen = False
        for metric in self._objects.values():
            metric.reset()

    def update(self, pred: object, target: object, samples: float) -> None:
        """Take in one batch."""
        if not samples:
            return
        self._has_seen = True
        for name, function in self._functions.items():
            if target is not None:
                value = function(pred, target)
            else:
                value = _without_target(name, function, pred)
                # `prediction == None` is False, and an array of it in NumPy.
                if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
                    raise _needs_target(name, f"which it compared, and returned {value!r}")
            total, weight = _as_totals(name, value, samples)
            self._meters.expect(name)
            self._meters.add_totals(name, total, weight)
        for name, metric in self._objects.items():
            if target is not None:
                metric.update(pred, target)
            else:
                _without_target(name or "metrics", metric.update, pred)

    def no_means(
        self, pred: Tensor, target: Tensor, *, draws: bool
    ) -> dict[str, tuple[float, float]]:
        """Return the callables that return a number which is no mean over samples, such as F1: that of a batch, and the mean of its halves.

        Each is called three times for a prediction.

        Args:
            pred: A batch that `has_halves`.
            target: Its target.
            draws: Whether random predictions are tried too, of a batch of which they `can_be_drawn`. A model that is not trained yet may
                predict one class for all samples, of which F1 is zero everywhere.
        """
        tried = [(pred, target)]
        if draws and self._functions:
            tried += [(each, target[: len(each)]) for each in _random_predictions(pred)]
        # A mean in 16 bits is rounded.
        is_short = any(
            each.is_floating_point() and each.element_size() < 4 for each in (pred, target)
        )
        tolerance = 1e-2 if is_short else 1e-3
        found: dict[str, tuple[float, float]] = {}
        for name, function in self._functions.items():
            for prediction, expected in tried:
                samples = len(prediction)
                half = samples // 2
                parts = slice(None), slice(half), slice(half, None)
                try:
                    values = [function(prediction[part], expected[part]) for part in parts]
                    of_batch, first, second = (float(value) for value in values)
                # One that sums itself, or needs the whole batch, which shows where it is called for it.
                except Exception:
                    continue
                mean = (half * first + (samples - half) * second) / samples
                # A number that is not finite says nothing, such as one of targets that are all ignored.
                is_finite = math.isfinite(of_batch) and math.isfinite(mean)
                if is_finite and not math.isclose(of_batch, mean, rel_tol=tolerance, abs_tol=1e-6):
                    found.setdefault(name, (of_batch, mean))
        return found

    def compute(self, domain: Domain | None = None) -> dict[str, float]:
        """Return the metrics over the domain, by name, the same on all its members. Call on all of them.

        A metric that no member has data for is left out; one whose data has no weight, such as targets that are all ignored, is NaN.
        Several values of one metric are called `name.key` or `name.0`.
        """
        result = self._meters.averages(domain) | self.compute_objects(domain)
        _check_names(result)
        return result

    # What `reset` leaves, or what is no state of torchmetrics

    def attributes(self, domain: Domain | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the numbers and small tensors in attributes of the objects that have changed since the set was made.

        Such as the place of `torchmetrics.wrappers.Running` in its window, and the extremes of `MinMaxMetric`. What differs between
        members is left out. Call on all members.
        """
        own = {
            name: {
                part: {
                    key: value
                    for key, value in held.items()
                    if not is_same(value, begun.get(part, {}).get(key))
                }
                for part, held in attributes_of(self._objects[name]).items()
            }
            for name, begun in self._begun.items()
        }
        own = {
            name: {part: held for part, held in parts.items() if held}
            for name, parts in own.items()
        }
        if domain is None or domain.size == 1:
            return own
        others = domain.gather_objects(own)
        return {
            name: {
                part: {
                    key: value
                    for key, value in held.items()
                    if all(
                        is_same(value, other.get(name, {}).get(part, {}).get(key))
                        for other in others
                    )
                }
                for part, held in parts.items()
            }
            for name, parts in own.items()
        }

    def load_attributes(self, state: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Restore what `attributes` returned, on every member; what an object lacks now is left out."""
        for name, metric in self._objects.items():
            for path, part in parts_of(metric).items():
                held = vars(part)
                stored = state.get(name, {}).get(path, {})
                # What another version of the class saved may be a method here, or have become a tensor.
                fitting = {
                    key: value
                    for key, value in stored.items()
                    if is_attribute(part, key, held.get(key))
                    and is_attribute(part, key, value)
                    and isinstance(value, Tensor) == isinstance(held[key], Tensor)
                }
                for key, value in fitting.items():
                    setattr(part, key, moved(value, getattr(held[key], "device", CPU)))

    def counts(self) -> dict[str, object]:
        """Return by object what tells whether it has had updates since; 0 where it has had none. May be called on one rank."""
        return {name: count_of(metric) for name, metric in self._objects.items()}

    def compute_objects(self, domain: Domain | None = None) -> dict[str, float]:
        """Return the metrics of objects over the domain; see `compute`. Call on all members."""
        result: dict[str, float] = {}
        for name, metric in self._objects.items():
            value = compute_metric(metric, domain, seen=self._has_seen)
            # Nothing was seen on any member.
            if value is None:
                continue
            for path, number in _flat((name,), value):
                result[".".join(filter(None, path))] = number
        return result


def has_halves(pred: object, target: object, read: int | None) -> bool:
    """Whether the samples of a batch can be divided into two parts.

    Args:
        pred: The prediction of a batch.
        target: Its target.
        read: How many samples the loader has read for it; `None` where it does not know.
    """
    if not (isinstance(pred, Tensor) and isinstance(target, Tensor) and pred.ndim and target.ndim):
        return False
    if len(pred) != read and pred.ndim > 1 and pred.shape[1] == read:
        # The time is first: a metric of the last step is another one of each half of the time.
        return False
    return 2 <= len(pred) == len(target)


def can_be_drawn(pred: object) -> bool:
    """Whether random predictions can take the place of one, of two samples at least."""
    return (
        isinstance(pred, Tensor)
        and pred.is_floating_point()
        and is_plain_tensor(pred)
        and has_strided_values(pred)
        and pred.ndim > 0
        and _drawn_samples(pred) > 1
    )


def _drawn_samples(pred: Tensor) -> int:
    of_sample = pred.shape[1:].numel()
    return min(len(pred), _MOST_DRAWN // max(of_sample, 1))


def _random_predictions(pred: Tensor) -> list[Tensor]:
    """Return random predictions of the first samples, the same on each call and rank; the streams of the run do not move."""
    shape = _drawn_samples(pred), *pred.shape[1:]
    generator = torch.Generator(CPU).manual_seed(0)
    drawn = [torch.rand(shape, generator=generator, device=CPU) for _ in range(_RANDOM_PREDICTIONS)]
    return [each.to(device=pred.device, dtype=pred.dtype) for each in drawn]


def metrics_by_name(metrics: object) -> dict[str, Any]:
    """Return by name the metrics of whatever the user gave; under `""` an object that names its metrics itself."""
    if metrics is None:
        return {}
    if isinstance(metrics, (Mapping, nn.ModuleDict)) and not hasattr(metrics, "compute"):
        return dict(metrics.items())
    # A collection of torchmetrics is a mapping too, and updates its metrics together.
    if isinstance(metrics, (nn.ModuleDict, MetricSet)):
        return {"": metrics}
    named = getattr(metrics, "name", None) or getattr(metrics, "__name__", None)
    return {named if isinstance(named, str) else type(metrics).__name__.lower(): metrics}


class TrainMetrics(MetricSet):
    """Metrics of training batches. The run's meters keep the means of callables; objects are copies, which no evaluation resets.

    Args:
        metrics: Those of the run.
        names: Which of them; `True` is all.
        meters: Those of the run, which are saved, logged and reset with the loss.

    Raises:
        ValueError: If there is no metric of a name, or an object holds its data in another way than torchmetrics does.
    """

    def __init__(self, metrics: MetricSet, names: bool | Sequence[str], meters: Meters) -> None:
        known = {**metrics._functions, **metrics._objects}
        asked = known if isinstance(names, bool) else names
        if not known or not known.keys() >= set(asked):
            raise ValueError(
                f"Expected train_metrics to name metrics of self.metrics, {sorted(known)}. Received: train_metrics={names!r}. Set "
                "self.metrics in __init__, or leave train_metrics out."
            )
        chosen = {name: known[name] for name in asked}
        others = [name for name in chosen if name in metrics._objects and not holders(chosen[name])]
        if others:
            raise ValueError(
                f"Expected metrics of training that are callables or have torchmetrics states, so that they can be saved within a pass. "
                f"Received: {others[0]!r}, a {type(chosen[others[0]]).__name__}. Name the others in train_metrics."
            )
        super().__init__(
            {
                name: copy.deepcopy(metric) if name in metrics._objects else metric
                for name, metric in chosen.items()
            }
        )
        self._meters = meters
        self.reset()

    def reset(self) -> None:
        """Forget what the objects have seen; the meters of the run are reset with the loss."""
        self._has_seen = False
        for metric in self._objects.values():
            metric.reset()

    def state_dict(self, domain: Domain | None = None) -> dict[str, Any]:
        """Return what the objects have seen on all members, as tensors and plain values. Call on all members."""
        return {
            name: merged_state(metric, domain, seen=self._has_seen)
            for name, metric in self._objects.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on one member; the others load an empty mapping."""
        self.reset()
        for name, metric in self._objects.items():
            load_state(metric, state.get(name, {}))
            self._has_seen = self._has_seen or bool(state.get(name))

    def remember(self) -> Callable[[], None]:
        """Remember what the objects have seen, and return what puts it back, as often as it is called. No communication."""
        # Lists are appended to and tensors added to in place, so that the objects are kept too, which other metrics may share.
        kept = [
            (part, name, value, list(value) if isinstance(value, list) else value.clone())
            for metric in self._objects.values()
            for part in owners_of(metric).values()
            for name in part._reductions
            for value in [getattr(part, name)]
        ]
        parts = [part for metric in self._objects.values() for part in holders(metric).values()]
        counts = [(part, part._update_count, part._computed) for part in parts]
        has_seen = self._has_seen
        attributes = {name: attributes_of(metric) for name, metric in self._objects.items()}

        def put_back() -> None:
            for part, name, value, before in kept:
                if isinstance(value, list):
                    value[:] = before
                else:
                    value.copy_(before)
                setattr(part, name, value)
            for part, count, computed in counts:
                part._update_count, part._computed = count, computed
            self.load_attributes(attributes)
            self._has_seen = has_seen

        return put_back


def _check_names(metrics: Mapping[str, object]) -> None:
    if "loss" in metrics:
        raise ValueError(
            "Expected metrics with names that are not taken. Received: a metric called 'loss', which is what the criterion returns. Call "
            "it 'loss_of_...', or override `compute_loss`."
        )


def _without_target(name: str, metric: Callable[[object, object], object], pred: object) -> object:
    """Call a metric with a target of `None`; what it cannot do without is said to be the target."""
    try:
        return metric(pred, None)
    except Exception as error:
        raise _needs_target(name, f"{type(error).__name__}: {error}") from error


def _needs_target(name: str, why: str) -> ValueError:
    return ValueError(
        f"Expected a target for metric {name!r}: the second part of a batch (input, target), or the key 'target' of a batch that "
        f"is a mapping. Received: a batch without one, so that the metric was called with None ({why}). "
        "Return the target from the dataset or the collate function, next to the input."
    )


def _as_totals(name: str, value: object, samples: float) -> tuple[Any, Any]:
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    # A vector of another length would be a mean over something that only the metric knows.
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
