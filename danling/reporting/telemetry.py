"""How fast the run is, what it waits for and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from danling.utils.messages import format_count
from danling.utils.protocols import ReductionDomain

_GIB = 2**30
_T = TypeVar("_T")
_MEMORY = ("memory_host_gib", "memory_allocated_gib", "memory_reserved_gib")


@dataclass(slots=True)
class Shared:
    """What the ranks know of each other when a log is due.

    Attributes:
        tokens: Tokens of all ranks since the last report.
        waited: Seconds since then that the rank waited for batches which waited longest; the others waited for it.
        memory: Peaks of the rank that has the highest, as `memory_figures`.
        own: What each rank gave of its own, by rank; empty where it gave nothing.
    """

    tokens: float
    waited: float
    memory: dict[str, float] = field(default_factory=dict)
    own: list[list[float]] = field(default_factory=list)


class Telemetry:
    """Figures of the updates between two logs, from clock readings and host numbers.

    `timed` and `stepped` add plain numbers and cost well below a microsecond; everything else is computed when a log is
    due. Nothing here waits for the device or talks to other ranks before that: then `share` is one collective, and a
    `grad_norm` on the device is read in `report`.

    Args:
        total_steps: Updates of the whole run; `None` when not known, then no time left is given.
        global_step: Updates done before this attempt.
        device: Device whose memory is reported; `None` for none.
        clock: Seconds, monotonic.

    Examples:
        >>> telemetry = Telemetry(total_steps=1000)
        >>> for batch in telemetry.timed(iter([[0.0] * 32])):
        ...     telemetry.stepped()
        >>> sorted(telemetry.report(1, samples=32))[:2]
        ['data_share', 'eta_seconds']
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        global_step: int = 0,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps = total_steps
        self.device = device
        self.clock = clock
        self.tokens: float = 0
        """Tokens of this rank since the last report."""
        self.skipped = 0
        """Updates of this attempt that were not committed."""
        self._updates = 0
        self._waited = 0.0
        self._aside = 0.0
        self._start = self._opened = clock()
        self._start_step = global_step
        self._done = 0
        self._all_waited = 0.0
        self._all_aside = 0.0

    def timed(self, batches: Iterator[_T]) -> Iterator[_T]:
        """Yield batches, and count the time that the loop waits for them.

        Args:
            batches: Where they come from.
        """
        clock = self.clock
        while True:
            before = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._waited += clock() - before
            yield batch

    def stepped(self, tokens: float = 0, *, committed: bool = True) -> None:
        """Count an update.

        Args:
            tokens: Tokens of this rank in it; a host number.
            committed: Whether the optimizer stepped.
        """
        self._updates += 1
        self.tokens += tokens
        if not committed:
            self.skipped += 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what happens inside (an evaluation, a checkpoint) out of the speed of training; the time left counts
        it."""
        before = self.clock()
        try:
            yield
        finally:
            self._aside += self.clock() - before

    @property
    def waited(self) -> float:
        """Seconds since the last report that this rank waited for batches."""
        return self._waited

    def share(self, domain: ReductionDomain, *, counts: bool = True, own: Sequence[float] = ()) -> Shared:
        """Tell the other ranks what only this one knows. One small collective; call on all ranks of the domain.

        Args:
            domain: The ranks.
            counts: Whether the tokens of this rank count: of several that read the same data, one does.
            own: Further numbers of this rank, which all learn; as many on each.
        """
        memory = memory_figures(self.device)
        if domain.size == 1:
            return Shared(self.tokens, self._waited, memory)
        mine = [self.tokens if counts else 0.0, self._waited, *(memory.get(name, 0.0) for name in _MEMORY), *own]
        # A sum over a row for each rank: sums and maxima in one collective.
        rows = torch.zeros(domain.size, len(mine), dtype=torch.float64)
        rows[domain.rank] = torch.tensor(mine, dtype=torch.float64)
        rows = domain.all_reduce(rows)
        highest = rows.amax(0).tolist()
        peaks = {name: peak for name, peak in zip(_MEMORY, highest[2:]) if peak}
        of_ranks = rows[:, 2 + len(_MEMORY) :].tolist() if own else []
        return Shared(float(rows[:, 0].sum()), highest[1], peaks, of_ranks)

    def report(
        self,
        global_step: int,
        *,
        samples: float = 0,
        shared: Shared | None = None,
        learning_rates: Sequence[float] = (),
        grad_norm: float | Tensor | None = None,
    ) -> dict[str, float]:
        """Return the metrics since the last report and open the next window.

        Args:
            global_step: Optimizer updates committed.
            samples: Samples of all ranks since the last report.
            shared: What `share` returned; `None` takes this rank's own.
            learning_rates: Of the parameter groups.
            grad_norm: Gradient norm of the last update, before clipping.

        Returns:
            `step_seconds`, `samples_per_second`, `data_share` (share of the time that was spent waiting for batches, in
            [0, 1]) and `skipped_updates` (of this attempt); where they are known `tokens_per_second`, `learning_rate`
            (with `.1` and so on for further groups), `grad_norm`, `eta_seconds`; and the peak memory in GiB.
        """
        now = self.clock()
        seconds = max(now - self._opened - self._aside, 1e-9)
        if shared is None:
            shared = Shared(self.tokens, self._waited, memory_figures(self.device))
        figures: dict[str, float] = {"skipped_updates": float(self.skipped)}
        if self._updates:
            figures["step_seconds"] = seconds / self._updates
            figures["samples_per_second"] = samples / seconds
            figures["data_share"] = min(shared.waited / seconds, 1.0)
        if shared.tokens:
            figures["tokens_per_second"] = shared.tokens / seconds
        for index, rate in enumerate(learning_rates):
            figures["learning_rate" if index == 0 else f"learning_rate.{index}"] = float(rate)
        if grad_norm is not None:
            figures["grad_norm"] = float(grad_norm)
        eta = self._seconds_left(global_step, now)
        if eta is not None:
            figures["eta_seconds"] = eta
        figures.update(shared.memory)
        self.open_window()
        return figures

    def summary(self, global_step: int, samples: float) -> str:
        """Return what this attempt did, in one line.

        Args:
            global_step: Optimizer updates committed.
            samples: Samples of all ranks in this attempt.
        """
        now = self.clock()
        elapsed = max(now - self._start, 1e-9)
        training = max(elapsed - self._all_aside - self._aside, 1e-9)
        updates, waited = self._done + self._updates, self._all_waited + self._waited
        if not updates:
            return f"no update in {elapsed:.1f} s"
        plural = "" if updates == 1 else "s"
        return (
            f"{updates} update{plural} to step {global_step} in {elapsed:.1f} s: {format_count(updates / training)} updates/s, "
            f"{format_count(samples / training)} samples/s, {100 * waited / training:.0f}% waiting for data, "
            f"{100 * (1 - training / elapsed):.0f}% evaluating and saving, {self.skipped} skipped"
        )

    def _seconds_left(self, global_step: int, now: float) -> float | None:
        done = global_step - self._start_step
        if self.total_steps is None or done <= 0:
            return None
        return (now - self._start) / done * max(self.total_steps - global_step, 0)

    def open_window(self) -> None:
        """Begin anew to count what `report` gives; for ranks that do not report themselves."""
        self._done += self._updates
        self._all_waited += self._waited
        self._all_aside += self._aside
        self._updates = 0
        self.tokens = 0
        self._waited = self._aside = 0.0
        self._opened = self.clock()


def memory_figures(device: torch.device | None) -> dict[str, float]:
    """Return peaks of memory in GiB: `memory_host_gib` of the process, and of a CUDA device what was allocated and
    reserved.

    The counters are kept on the host: nothing waits for the device.

    Args:
        device: The device of this process; `None` for the process alone.
    """
    figures = {}
    if device is not None and device.type == "cuda":
        figures["memory_allocated_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        figures["memory_reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    host = _peak_resident_bytes()
    if host is not None:
        figures["memory_host_gib"] = host / _GIB
    return figures


def _peak_resident_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
