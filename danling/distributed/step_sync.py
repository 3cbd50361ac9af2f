"""The one collective of an update: its weight, whether it is finite, and the requests of the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from danling.utils.devices import pins_memory

from .domain import Domain

REQUESTS = (
    "save",
    "stop",
    "interrupt",
    "terminate",
    "user_signal",
    "exhausted",
    "continue",
    "regroup",
)
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


class HostCopy:
    """Numbers on their way to the host, which does not wait for the device before it reads them."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._event = None
        if values.device.type == "cpu":
            return
        pins = pins_memory(values.device.type)
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=pins)
        self._host.copy_(values, non_blocking=pins)  # elsewhere nothing would say when it is there
        if pins:
            self._event = torch.Event(device=values.device)
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers; wait for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._host.tolist()
        return found


class ExtraReduction(Protocol):
    """Sums numbers over the ranks in the collective of an update."""

    def values(self) -> Tensor | None:
        """Return them, float64 of one dimension, on the device of the collective; the same length on all ranks, or `None` on all."""

    def take(self, sums: Tensor) -> None:
        """Take their sums. Called on all ranks."""


class ReplicaDriftError(RuntimeError):
    """Ranks that hold copies of a tensor hold different values: a chip, a link or a program has written to one of them alone."""


UNUSED_PARAMETER = (
    "The usual cause is a trained parameter that the last micro-batch of an update does not use, or that was frozen since: "
    "DistributedDataParallel then leaves gradients on their ranks. Override `ddp_kwargs` and return "
    "{**super().ddp_kwargs(), 'find_unused_parameters': True}."
)


class GradientNorms:
    """Compares the norm of each gradient between ranks that hold copies, in the collective of the next update.

    The reduced gradient of healthy ranks is the same to the bit. Ranks whose norms differ train different models.

    Args:
        domain: Ranks that have the same gradient after its reduction.
        device: Where norms live. On an accelerator the sums are read one update later, so that the host never waits for the device.
        largest_spread: Largest difference between norms, relative to their mean.
        is_wrapped: Whether DistributedDataParallel reduces the gradient.
    """

    def __init__(
        self,
        domain: Domain,
        device: torch.device,
        largest_spread: float,
        *,
        is_wrapped: bool = False,
    ) -> None:
        self.domain = domain
        self._is_wrapped = is_wrapped
        self.device = device
        self.largest_spread = largest_spread
        self._noted: tuple[int, float | Tensor] | None = None
        self._sent: tuple[int, float | Tensor] | None = None
        self._landed: tuple[tuple[int, float | Tensor], HostCopy] | None = None

    def note(self, step: int, norm: float | Tensor) -> None:
        """Note the norm of a committed update, 0-dim. Called on all ranks, or on none; where a domain has one rank, on none.

        Args:
            step: Number of the update.
            norm: 2-norm of the whole gradient.
        """
        self._noted = step, norm.detach() if isinstance(norm, Tensor) else norm

    def values(self) -> Tensor | None:
        """Return the norm that was noted last, and its square; `None` where no update was made since."""
        self._read_landed()
        self._sent, self._noted = self._noted, None
        if self._sent is None:
            return None
        norm = torch.as_tensor(self._sent[1], dtype=torch.float64, device=self.device).reshape(())
        return torch.stack([norm, norm * norm])

    def take(self, sums: Tensor) -> None:
        """Take the sums of norms and squares over the ranks. Called on all ranks.

        Raises:
            ReplicaDriftError: On all ranks, if the norms differ.
        """
        sent, self._sent = self._sent, None
        assert sent is not None
        self._landed = sent, HostCopy(sums)
        if self.device.type == "cpu":
            self._read_landed()

    def drop_pending(self) -> None:
        """Forget norms that were not compared, since a rank has ended. No communication."""
        self._noted = self._sent = self._landed = None

    def settle(self) -> None:
        """Compare now what has not been compared, before a save. Called on all ranks; one small collective after an update.

        Raises:
            ReplicaDriftError: On all ranks, if the norms differ.
        """
        values = self.values()
        if values is not None:
            self.take(self.domain.all_reduce(values))
            self._read_landed()

    def _read_landed(self) -> None:
        landed, self._landed = self._landed, None
        if landed is None:
            return
        (step, norm), sums = landed
        total, squares = sums.read()
        mean = total / self.domain.size
        # The root of the summed squares of the deviations is never less than the largest one. A norm that is not finite compares as false:
        # the check of the update itself deals with it.
        if math.sqrt(max(squares - total * mean, 0.0)) > self.largest_spread * mean:
            raise self._error(step, norm)

    def _error(self, step: int, norm: float | Tensor) -> ReplicaDriftError:
        norms = self.domain.gather_objects(float(norm))
        usual = sorted(norms)[len(norms) // 2]
        furthest = sorted(range(len(norms)), key=lambda rank: -abs(norms[rank] - usual))[:7]
        shown = ", ".join(
            f"{norms[rank]:.6g} on rank {rank}" for rank in sorted({*furthest, norms.index(usual)})
        )
        causes = (
            "A forward that goes around the wrapped model, such as self.unwrapped_model(x) or self.model.module(x) in train_step, leaves "
            "its gradient on its rank: call self.model(x). So does the second of two backwards that follow two forwards: call "
            "self.backward once, with the sum of the losses. Where ranks are meant to have different gradients, set "
            "audit.gradient_spread to none. If there is no such cause, a chip or a link may be faulty."
        )
        if self._is_wrapped:
            causes = f"{UNUSED_PARAMETER} {causes}"
        return ReplicaDriftError(
            f"Expected one gradient on all ranks that hold copies of the model. Received in update {step}: gradients of norm {shown}. "
            f"{causes}"
        )


class StepSync:
    """Sums the values of an update over the ranks of a domain, in one collective.

    On the CPU the result is known when `reduce` returns. On an accelerator the sums stay on the device, and the requests are
    copied to the host asynchronously and read with the next update: the host never waits for the device, and every rank reads the
    same requests at the same update.

    Attributes:
        extra_reductions: What else is summed in the collective of an update.
    """

    def __init__(
        self, domain: Domain, device: torch.device, *, reports: tuple[bool, bool] = (True, True)
    ) -> None:
        self.domain = domain
        self.device = device
        self.reports_loss, self.reports_samples = reports
        self.extra_reductions: list[ExtraReduction] = []
        self._in_flight: HostCopy | None = None

    def reduce(self, own: StepTotals) -> StepTotals:
        """Sum this rank's share of a window with those of the others. Call on all ranks of the domain.

        Args:
            own: Weight, loss and samples of this rank, whether its loss was not finite (1 or 0), and its requests.
        """
        if self.domain.size == 1:
            return own
        # Of the ranks that compute the same loss, or see the same samples, one reports them.
        weighed = (own.weight, own.loss) if self.reports_loss else (0.0, 0.0)
        mine = [*weighed, own.samples if self.reports_samples else 0.0, own.nonfinite]
        extras = [
            (extra, values)
            for extra in self.extra_reductions
            if (values := extra.values()) is not None
        ]
        if self.device.type == "cpu":
            flags = [float(name in own.requests) for name in REQUESTS]
            flat = torch.tensor([*map(float, mine), *flags], dtype=torch.float64)
            weight, loss, samples, nonfinite, *counts = self._sum(flat, extras).tolist()
            return StepTotals(weight, loss, samples, nonfinite, _names(counts))
        heard = self.take_pending_requests()
        # Numbers are made on the device: for the copy of one, the host would wait.
        scalars = [
            value.double()
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=torch.float64, device=self.device)
            for value in mine
        ]
        asked = torch.zeros(len(REQUESTS), dtype=torch.float64, device=self.device)
        for name in own.requests:
            asked[REQUESTS.index(name)].fill_(1.0)
        sums = self._sum(torch.cat([torch.stack(scalars), asked]), extras)
        # Behind the four sums are the counts of the requests.
        self._in_flight = HostCopy(sums[4:])
        return StepTotals(sums[0], sums[1], sums[2], sums[3], heard)

    def _sum(self, own: Tensor, extras: list[tuple[ExtraReduction, Tensor]]) -> Tensor:
        """Return the sums of `own` over the ranks, and give each extra reduction its share."""
        total = self.domain.all_reduce(
            torch.cat([own, *(values for _, values in extras)]) if extras else own
        )
        end = len(own)
        for extra, values in extras:
            begin, end = end, end + len(values)
            extra.take(total[begin:end])
        return total[: len(own)]

    def drop_pending(self) -> None:
        """Forget the requests of an update in which a rank has ended. No communication."""
        self._in_flight = None

    def take_pending_requests(self) -> frozenset[str]:
        """Return the requests of the last update that have not been handed out yet."""
        pending, self._in_flight = self._in_flight, None
        return frozenset() if pending is None else _names(pending.read())


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
