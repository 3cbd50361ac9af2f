"""Weighted sums, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from danling.distributed import Domain
from danling.utils.tensors import is_part


class Meter:
    """Sum and weight of one metric, in float64.

    On the CPU they are Python floats; on an accelerator 0-dim tensors, which are not waited for.
    """

    __slots__ = ("sum", "terms", "weight")

    def __init__(self, sum: float | Tensor = 0.0, weight: float | Tensor = 0.0) -> None:
        self.sum = sum
        self.weight = weight
        self.terms: list[tuple[float | Tensor, float | Tensor]] = []
        """All sums and weights, where their order must not matter."""

    @property
    def average(self) -> float:
        """The weighted mean so far; NaN before the first value."""
        weight = float(self.weight)
        return float(self.sum) / weight if weight else float("nan")


class Meters:
    """Weighted means by name, exact over batches of any size and over ranks.

    Examples:
        >>> meters = Meters()
        >>> meters.update({"loss": 2.0}, weight=3)
        >>> meters.update({"loss": 4.0}, weight=1)
        >>> meters.averages()
        {'loss': 2.5}

    Args:
        reserved: Names that are refused, since their metrics come from elsewhere and would be mixed with these.
        exact: Whether totals are rounded once, so that they have the same bits in any order and at any number of ranks. All terms are kept.
    """

    def __init__(self, *, reserved: Iterable[str] = (), exact: bool = False) -> None:
        self.exact = exact
        self._meters: dict[str, Meter] = {}
        self._reserved = frozenset(reserved)
        self._expected: set[str] = set()

    def __getitem__(self, name: str) -> Meter:
        return self._meters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._meters

    def __iter__(self) -> Iterator[str]:
        return iter(self._meters)

    def __len__(self) -> int:
        return len(self._meters)

    def update(self, values: Mapping[str, float | Tensor], weight: float | Tensor = 1.0) -> None:
        """Take in means over `weight`. Values on an accelerator are not waited for.

        Args:
            values: Means by name, 0-dim. The mean of nothing, a NaN of weight 0, leaves no trace.
            weight: What they are means over.

        Raises:
            ValueError: If a value is not a single number, or its name is reserved.
        """
        if type(weight) is not float:
            weight = _number("weight", weight)
        for name, value in values.items():
            if type(value) is not float:
                value = _number(name, value)
            self.add_totals(name, value * weight, weight)

    def add_totals(self, name: str, sum: float | Tensor, weight: float | Tensor) -> None:
        """Take in a sum and its weight, both 0-dim; a sum of weight 0 leaves no trace.

        Raises:
            ValueError: If one of them is not a single number, or the name is reserved.
        """
        if type(sum) is not float:
            sum = _number(name, sum)
        if type(weight) is not float:
            weight = _number("weight", weight)
        if name in self._reserved:
            raise ValueError(
                f"Expected a name out of use for a meter. Received: {name!r}, which the runner computes itself. Choose another "
                f"name, such as 'my_{name}'."
            )
        if isinstance(weight, Tensor):
            sum = torch.where(
                weight != 0, torch.as_tensor(sum, dtype=torch.float64, device=weight.device), 0.0
            )
        elif not weight:
            return  # a sum of nothing may be NaN
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter()
        # Not in place: what was made in inference mode may not be changed outside of it.
        meter.sum = meter.sum + sum
        meter.weight = meter.weight + weight
        if self.exact:
            meter.terms.append((sum, weight))

    def expect(self, name: str) -> None:
        """Have `averages` return NaN for a name that gets no weight on any rank, instead of leaving it out."""
        self._expected.add(name)

    def merge(self, others: Meters) -> None:
        """Take in all that other meters of this rank have seen."""
        for name, meter in others._meters.items():
            for total, weight in meter.terms or [(meter.sum, meter.weight)]:
                self.add_totals(name, total, weight)

    def totals(self, domain: Domain | None = None) -> dict[str, tuple[float, float]]:
        """Return `(sum, weight)` by name over the domain; the local sums stay as they are. Call on all its members.

        Every member takes part in the same two collectives, whichever names it has seen.

        Args:
            domain: Ranks to sum over; `None` is this one alone.
        """
        return self._summed(domain)[0]

    def _summed(self, domain: Domain | None) -> tuple[dict[str, tuple[float, float]], set[str]]:
        """Return the totals over the domain, and the names that one of its members expects."""
        # Sorted, since all ranks must put the names in one order.
        names = sorted(self._meters)
        expected = set(self._expected)
        shared = domain is not None and domain.size > 1
        if domain is not None and shared:
            members = domain.gather_objects((names, expected))
            names = sorted({name for known, _ in members for name in known})
            expected = set().union(*(asked for _, asked in members))
        if not names:
            return {}, expected
        if self.exact:
            return self._exact_totals(names, domain if shared else None), expected
        mine = [self._meters.get(name) or Meter() for name in names]
        figures = _read([*(meter.sum for meter in mine), *(meter.weight for meter in mine)])
        if domain is not None and shared:
            figures = domain.all_reduce(torch.tensor(figures, dtype=torch.float64)).tolist()
        return dict(zip(names, zip(figures, figures[len(names) :]))), expected

    def _exact_totals(
        self, names: list[str], domain: Domain | None
    ) -> dict[str, tuple[float, float]]:
        # All terms travel, and each rank rounds their exact sum once.
        own = [self._meters[name].terms if name in self._meters else [] for name in names]
        mine = [[_read([pair[part] for pair in terms]) for terms in own] for part in (0, 1)]
        ranks = [mine] if domain is None else domain.gather_objects(mine)
        sums, weights = (
            [_rounded(chain(*lists)) for lists in zip(*(rank[part] for rank in ranks))]
            for part in (0, 1)
        )
        return dict(zip(names, zip(sums, weights)))

    def averages(self, domain: Domain | None = None) -> dict[str, float]:
        """Return the weighted means over the domain. Call on all its members.

        A name without any weight is left out, since there is no mean of nothing; one that was expected is NaN.
        """
        totals, expected = self._summed(domain)
        found = {name: total / weight for name, (total, weight) in totals.items() if weight}
        return {**found, **dict.fromkeys(expected - found.keys(), math.nan)}

    def reset(self) -> None:
        """Forget everything."""
        self._meters.clear()
        self._expected.clear()

    @contextmanager
    def isolated(self, *, exact: bool = False) -> Iterator[None]:
        """Put aside what was taken in so far: inside, the meters begin empty, and on exit they are what they were.

        Args:
            exact: Whether the meters are exact inside.
        """
        kept, self._meters, was_exact, self.exact = self._meters, {}, self.exact, exact
        try:
            yield
        finally:
            self._meters, self.exact = kept, was_exact

    def remember(self) -> Callable[[], None]:
        """Return what puts the meters back to what they have seen up to here. A device is not waited for."""
        kept = {
            name: (meter.sum, meter.weight, len(meter.terms))
            for name, meter in self._meters.items()
        }

        def put_back() -> None:
            now, self._meters = self._meters, {}
            # Terms are only appended, so a number of them is enough to go back to.
            for name, (total, weight, terms) in kept.items():
                meter = self._meters[name] = Meter(total, weight)
                meter.terms = now[name].terms[:terms] if name in now else []

        return put_back

    def state_dict(self) -> dict[str, list[float]]:
        """Return `[sum, weight]` by name, as floats."""
        return {name: list(totals) for name, totals in self.totals().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._meters = {name: Meter(*values) for name, values in state.items()}


def _number(name: str, value: object) -> float | Tensor:
    """Return a 0-dim value as a float, or on an accelerator as a float64 tensor that is not waited for."""
    if isinstance(value, Tensor) and not value.is_cpu:
        if value.numel() != 1:
            raise _not_a_number(name, value)
        if type(value) is not Tensor:
            check_whole(name, value)
        return value.detach().reshape(()).double()
    return as_number(name, value)


def as_number(name: str, value: object) -> float:
    """Return a metric as a float: a number of Python or numpy, or a tensor with one element, which is waited for.

    Args:
        name: What the metric is called in the error.
        value: The figure.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            check_whole(name, value)
        # `item` of several elements is a RuntimeError, that of a complex number makes `float` fail.
        try:
            return float(value.item())
        except (RuntimeError, TypeError) as error:
            raise _not_a_number(name, value) from error
    # Scalars of numpy and arrays without dimensions have a shape; strings, of which float() would read some, have none.
    if isinstance(value, Real) or (
        getattr(value, "shape", None) == () and hasattr(value, "__float__")
    ):
        return float(value)
    raise _not_a_number(name, value)


def check_whole(name: str, value: object) -> None:
    """Refuse what one rank has of a number. It could be made whole only with the other ranks, and not all of them may log it."""
    if isinstance(value, Tensor) and is_part(value):
        placements = ", ".join(map(str, value.placements))  # type: ignore[attr-defined]
        raise ValueError(
            f"Expected the whole of metric {name!r}. Received: a DTensor ({placements}), of which this rank has a part. Call full_tensor() "
            "on it, on all ranks."
        )


def check_numbers(figures: Mapping[str, object], error: Exception) -> None:
    """Raise an error with the name of the first figure that is no number, if one is why logging them has failed with `error`."""
    for name, value in figures.items():
        try:
            float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            raise _not_a_number(name, value) from error


def _not_a_number(name: str, value: object) -> ValueError:
    shape = getattr(value, "shape", None)
    kind = "tensor" if isinstance(value, Tensor) else type(value).__name__
    received = f"{value!r} ({kind})" if shape is None else f"a {kind} of shape {tuple(shape)}"
    fix = "Reduce what has more than one, such as by .mean()."
    if isinstance(value, str):
        fix = "Send a text with log_text(name, text)."
    return ValueError(f"Expected a single number for metric {name!r}. Received: {received}. {fix}")


def _read(figures: Sequence[float | Tensor]) -> list[float]:
    """Return numbers and 0-dim tensors as floats, waiting for a device once."""
    waiting = [figure for figure in figures if isinstance(figure, Tensor)]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    return [next(read) if isinstance(figure, Tensor) else float(figure) for figure in figures]


def _rounded(terms: Iterable[float]) -> float:
    """Return the sum of terms, rounded once; NaN where infinities cancel."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return math.nan
