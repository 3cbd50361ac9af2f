"""Weighted sums, divided once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from danling.utils.protocols import ReductionDomain


class Meter:
    """Sum and weight of one figure, in float64.

    On the CPU they are Python floats; on an accelerator 0-dim tensors that nobody waits for.
    """

    __slots__ = ("sum", "weight")

    def __init__(self, sum: float | Tensor = 0.0, weight: float | Tensor = 0.0) -> None:
        self.sum = sum
        self.weight = weight

    @property
    def average(self) -> float:
        """The weighted mean so far; NaN before the first value."""
        weight = float(self.weight)
        return float(self.sum) / weight if weight else float("nan")


class Meters:
    """Weighted means by name, exact over batches of any size and over ranks.

    Example:
        >>> meters = Meters()
        >>> meters.update({"loss": 2.0}, weight=3)
        >>> meters.update({"loss": 4.0}, weight=1)
        >>> meters.averages()
        {'loss': 2.5}
    """

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def __getitem__(self, name: str) -> Meter:
        return self._meters[name]

    def __len__(self) -> int:
        return len(self._meters)

    def update(self, values: Mapping[str, float | Tensor], weight: float | Tensor = 1.0) -> None:
        """Take in means over `weight`.

        Args:
            values: Means by name, 0-dim.
            weight: What they are means over.
        """
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.item() if value.device.type == "cpu" else value.detach().double()
            self.add_totals(name, value * weight, weight)

    def add_totals(self, name: str, sum: float | Tensor, weight: float | Tensor) -> None:
        """Take in a sum and its weight."""
        if isinstance(sum, Tensor):
            sum = sum.item() if sum.device.type == "cpu" else sum.detach().double()
        if isinstance(weight, Tensor) and weight.device.type == "cpu":
            weight = weight.item()
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter()
        meter.sum = meter.sum + sum
        meter.weight = meter.weight + weight

    def totals(self, domain: ReductionDomain | None = None) -> dict[str, tuple[float, float]]:
        """Return `(sum, weight)` by name over the domain. Call on all its members.

        Every member takes part in the same two collectives, whichever names it has seen.

        Args:
            domain: Ranks to sum over; `None` is this one alone.
        """
        if domain is None or domain.size == 1:
            return {name: (float(self._meters[name].sum), float(self._meters[name].weight)) for name in sorted(self._meters)}
        names = sorted({name for members in domain.gather_objects(list(self._meters)) for name in members})
        if not names:
            return {}
        mine = [self._meters.get(name, Meter()) for name in names]
        sums = [float(meter.sum) for meter in mine]
        weights = [float(meter.weight) for meter in mine]
        summed = domain.all_reduce(torch.tensor([sums, weights], dtype=torch.float64)).tolist()
        return {name: (summed[0][i], summed[1][i]) for i, name in enumerate(names)}

    def averages(self, domain: ReductionDomain | None = None) -> dict[str, float]:
        """Return the weighted means over the domain. Call on all its members.

        A name without any weight is left out: there is no mean of nothing.
        """
        return {name: total / weight for name, (total, weight) in self.totals(domain).items() if weight}

    def reset(self) -> None:
        """Forget everything."""
        self._meters.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return `[sum, weight]` by name."""
        return {name: [float(meter.sum), float(meter.weight)] for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._meters = {name: Meter(*values) for name, values in state.items()}
