"""How fast the run is, what it waits for and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_GIB = 2**30


class Telemetry:
    """Figures of the updates between two logs, from clock readings and host numbers.

    `loaded` and `stepped` add plain numbers and cost well below a microsecond; everything else is computed in `report`,
    when a log is due. Nothing here waits for the device or talks to other ranks, except that a `grad_norm` on the
    device is read in `report`.

    Args:
        total_steps: Updates of the whole run; `None` when not known, then no time left is given.
        global_step: Updates done before this attempt.
        device: Device whose memory is reported; `None` for none.
        clock: Seconds, monotonic.

    Examples:
        >>> telemetry = Telemetry(total_steps=1000)
        >>> clock = telemetry.clock
        >>> before = clock(); batch = [0.0] * 32; telemetry.loaded(before, clock())
        >>> telemetry.stepped(samples=32)
        >>> sorted(telemetry.report(1))[:2]
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
        self.samples: float = 0
        """Samples of this rank since the last report."""
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
        self._all_samples: float = 0
        self._all_waited = 0.0
        self._all_aside = 0.0

    def loaded(self, before: float, after: float) -> None:
        """Add the time that the loop waited for a batch.

        Args:
            before: Clock before the batch was asked for.
            after: Clock when it was there.
        """
        self._waited += after - before

    def stepped(self, samples: float, tokens: float = 0, *, committed: bool = True) -> None:
        """Count an update.

        Args:
            samples: Samples of this rank in it; a host number.
            tokens: Tokens of this rank in it; a host number.
            committed: Whether the optimizer stepped.
        """
        self._updates += 1
        self.samples += samples
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

    def report(
        self,
        global_step: int,
        *,
        learning_rates: Sequence[float] = (),
        grad_norm: float | Tensor | None = None,
        samples: float | None = None,
        tokens: float | None = None,
    ) -> dict[str, float]:
        """Return the figures since the last report and open the next window.

        Args:
            global_step: Optimizer updates committed.
            learning_rates: Of the parameter groups.
            grad_norm: Gradient norm of the last update, before clipping.
            samples: Samples of all ranks since the last report, where they were reduced; `None` takes this rank's.
            tokens: As `samples`.

        Returns:
            `step_seconds`, `samples_per_second`, `data_share` (share of the time that was spent waiting for batches, in
            [0, 1]) and `skipped_updates` (of this attempt); where they are known `tokens_per_second`, `learning_rate`
            (with `.1` and so on for further groups), `grad_norm`, `eta_seconds`; and the peak memory in GiB.
        """
        now = self.clock()
        seconds = max(now - self._opened - self._aside, 1e-9)
        tokens = self.tokens if tokens is None else tokens
        figures: dict[str, float] = {"skipped_updates": float(self.skipped)}
        if self._updates:
            figures["step_seconds"] = seconds / self._updates
            figures["samples_per_second"] = (self.samples if samples is None else samples) / seconds
            figures["data_share"] = min(self._waited / seconds, 1.0)
        if tokens:
            figures["tokens_per_second"] = tokens / seconds
        for index, rate in enumerate(learning_rates):
            figures["learning_rate" if index == 0 else f"learning_rate.{index}"] = float(rate)
        if grad_norm is not None:
            figures["grad_norm"] = float(grad_norm)
        eta = self._seconds_left(global_step, now)
        if eta is not None:
            figures["eta_seconds"] = eta
        figures.update(memory_figures(self.device))
        self._open_window(now)
        return figures

    def summary(self, global_step: int) -> str:
        """Return what this attempt did, in one line.

        Args:
            global_step: Optimizer updates committed.
        """
        now = self.clock()
        elapsed = max(now - self._start, 1e-9)
        training = max(elapsed - self._all_aside - self._aside, 1e-9)
        updates, samples = self._done + self._updates, self._all_samples + self.samples
        waited = self._all_waited + self._waited
        return (
            f"{updates} updates to step {global_step} in {elapsed:.1f} s: {updates / training:.3g} updates/s, "
            f"{samples / training:.4g} samples/s on this rank, {100 * waited / training:.0f}% waiting for data, "
            f"{self.skipped} skipped"
        )

    def _seconds_left(self, global_step: int, now: float) -> float | None:
        done = global_step - self._start_step
        if self.total_steps is None or done <= 0:
            return None
        return (now - self._start) / done * max(self.total_steps - global_step, 0)

    def _open_window(self, now: float) -> None:
        self._done += self._updates
        self._all_samples += self.samples
        self._all_waited += self._waited
        self._all_aside += self._aside
        self._updates = 0
        self.samples = self.tokens = 0
        self._waited = self._aside = 0.0
        self._opened = now


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
