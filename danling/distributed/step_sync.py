"""The one collective of an update: its weight, whether it is finite, and the requests of the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .domain import Domain

REQUESTS = ("save", "stop", "interrupt", "terminate", "user_signal", "exhausted", "continue")
"""Requests that a rank can make. They are counted over the ranks, so that all ranks learn of the request of a single one."""


@dataclass(slots=True)
class StepTotals:
    """The sums of a window over all ranks; the same on every one of them.

    Attributes:
        weight: Global weight of the window: a float on the CPU, else a 0-dim float64 tensor on the device.
        loss: Global sum of loss times weight, as `weight`.
        samples: Global number of samples, as `weight`.
        nonfinite: Number of ranks whose loss is not finite, as `weight`.
        requests: Names out of `REQUESTS` that at least one rank asked for.
    """

    weight: float | Tensor
    loss: float | Tensor
    samples: float | Tensor
    nonfinite: float | Tensor
    requests: frozenset[str] = field(default_factory=frozenset)


class Rider(Protocol):
    """What has numbers of its own to sum over the ranks, now and then, and needs no collective of its own for it."""

    def values(self) -> Tensor | None:
        """Return them, float64 of one dimension, on the device of the collective; the same length on all ranks, or `None` on all."""

    def take(self, sums: Tensor) -> None:
        """Take their sums. Called on all ranks."""


class StepSync:
    """Sums the values of an update over the ranks of a domain, in one collective.

    On the CPU the result is known when `reduce` returns. On an accelerator the sums stay on the device, and the requests are
    copied to the host asynchronously and read with the next update: the host never waits for the device, and every rank reads the
    same requests at the same update.

    Args:
        domain: The ranks that decide together.
        device: Where weights and losses live.
        reports: Whether the weight and loss of this rank count, and whether its samples do: if several ranks work on one micro-batch
            together, one of them reports it. Non-finite losses and requests always count.
    """

    rider: Rider | None = None
    """What travels with the collective; `None` where nothing does."""

    def __init__(self, domain: Domain, device: torch.device, *, reports: tuple[bool, bool] = (True, True)) -> None:
        self.domain = domain
        self.device = device
        self.reports_loss, self.reports_samples = reports
        self._in_flight: tuple[Tensor, torch.cuda.Event] | None = None

    def reduce(
        self,
        *,
        weight: float | Tensor,
        loss: float | Tensor,
        samples: float,
        nonfinite: float | Tensor,
        requests: Iterable[str] = (),
    ) -> StepTotals:
        """Sum this rank's values with those of the others. Call on all ranks of the domain.

        Args:
            weight: Weight of this rank's share of the window.
            loss: Sum of loss times weight over this rank's share.
            samples: Number of samples in this rank's share.
            nonfinite: 1 when this rank saw a loss that is not finite, else 0.
            requests: Names out of `REQUESTS`.
        """
        asked = frozenset(requests)
        if self.domain.size == 1:
            return StepTotals(weight, loss, samples, nonfinite, asked)
        if not self.reports_loss:
            weight, loss = 0.0, 0.0
        if not self.reports_samples:
            samples = 0.0
        flags = [float(name in asked) for name in REQUESTS]
        if self.rider is not None:
            riding = self.rider.values()
            if riding is not None:
                return self._reduce_with(self.rider, riding, [weight, loss, samples, nonfinite], flags)
        if self.device.type == "cpu":
            return self._reduce_on_host([float(weight), float(loss), samples, float(nonfinite), *flags])
        return self._reduce_on_device([weight, loss, samples, nonfinite], flags)

    def _reduce_on_host(self, values: list[float]) -> StepTotals:
        total = self.domain.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        weight, loss, samples, nonfinite = total[:4]
        return StepTotals(weight, loss, samples, nonfinite, _names(total[4:]))

    def _reduce_with(
        self, rider: Rider, riding: Tensor, values: list[float | Tensor], flags: list[float]
    ) -> StepTotals:
        if self.device.type != "cpu":
            return self._reduce_on_device(values, flags, riding, rider)
        own = torch.tensor([*map(float, values), *flags], dtype=torch.float64)
        sums = self.domain.all_reduce(torch.cat([own, riding]))
        total = sums[: len(own)].tolist()
        weight, loss, samples, nonfinite = total[:4]
        rider.take(sums[len(own) :])
        return StepTotals(weight, loss, samples, nonfinite, _names(total[4:]))

    def _reduce_on_device(
        self, values: list[float | Tensor], flags: list[float], riding: Tensor | None = None, rider: Rider | None = None
    ) -> StepTotals:
        heard = self.take_pending_requests()
        scalars = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        asked = torch.tensor(flags, dtype=torch.float64).to(self.device, non_blocking=True)
        own = torch.cat([torch.stack(scalars), asked])
        total = self.domain.all_reduce(own if riding is None else torch.cat([own, riding]))
        if rider is not None:
            rider.take(total[len(own) :])
            total = total[: len(own)]
        host = torch.empty(len(flags), dtype=torch.float64, pin_memory=True)
        host.copy_(total[4:], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._in_flight = (host, event)
        return StepTotals(total[0], total[1], total[2], total[3], heard)

    def take_pending_requests(self) -> frozenset[str]:
        """Return the requests of the last update that have not been handed out yet."""
        if self._in_flight is None:
            return frozenset()
        host, event = self._in_flight
        self._in_flight = None
        event.synchronize()
        return _names(host.tolist())


def agree(domain: Domain, requests: Iterable[str]) -> frozenset[str]:
    """Return the requests of any rank, outside an update. Call on all ranks of the domain.

    Args:
        domain: The ranks that decide together.
        requests: Names out of `REQUESTS`.
    """
    asked = frozenset(requests)
    if domain.size == 1:
        return asked
    flags = torch.tensor([float(name in asked) for name in REQUESTS], dtype=torch.float64)
    return _names(domain.all_reduce(flags).tolist())


def _names(counts: list[float]) -> frozenset[str]:
    return frozenset(name for name, count in zip(REQUESTS, counts) if count > 0)
