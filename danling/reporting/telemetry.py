"""How fast the run is, what it waits for and how long it will take, and the share that this is of what its devices could do."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from danling.config.names import STACKS
from danling.utils.devices import memory_stats
from danling.utils.messages import format_count
from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training.outcome import UpdateOutcome

_GIB = 2**30
_MEMORY = ("memory_host_gib", "memory_allocated_gib", "memory_reserved_gib")
_SPEEDS = ("step_seconds", "samples_per_second", "data_share", "tokens_per_second", "eta_seconds")
MEASURED = frozenset({*_MEMORY, *_SPEEDS, "model_flops_per_second", "mfu"})
"""Figures of `Telemetry.report` that one rank may have and another one not, such as tokens of a rank that reads no micro-batch."""


class Telemetry(Observer):
    """Figures of the updates between two logs, from clock readings and host numbers.

    The events of an update add plain numbers; everything else is computed when a log is due. Nothing here waits for the device or
    communicates before that: then `report` makes one collective.

    Attributes:
        waited: Seconds that this rank has waited for batches.
    """

    critical = True

    def __init__(
        self, runner: BaseRunner, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._owner, self._clock = runner, clock
        self._runner: TorchRunner | None = None
        """The runner while it trains."""
        self.samples_at_log = 0
        self._flops: FlopsOfSample | None = None
        self._depth = 0
        self.adds_ranks = True
        """Whether the figures of all ranks are added in a collective; elastic ranks report those of the main process."""
        self._clear()

    def _clear(self) -> None:
        self.updates = self.skipped = 0
        self.tokens = self.waited = self._aside = 0.0
        self._start = self._wait_began = self._paused_at = self._clock()
        self._at_report = (self._start, 0, 0.0, 0.0, 0.0)
        self._before_update: float | None = None

    def begin(self, runner: TorchRunner) -> None:
        """Begin to measure a training."""
        self._clear()
        self._runner, self._start_step = runner, runner.state.train.global_step
        self.samples_at_log = self._samples_at_start = runner.state.train.samples
        self._peak = runner.peak_flops()
        is_known = (runner.flops_per_token() or runner.flops_per_sample()) is not None
        countable = (
            runner.stack in STACKS
            and STACKS[runner.stack].counts_flops
            and not runner.config.compile.enable
        )
        # Without a peak to compare with nothing is worth the slow first micro-batch.
        if not is_known and countable and self._peak is not None:
            self._flops = FlopsOfSample(runner)
            runner.observers.append(self._flops)

    def end(self) -> None:
        """Measure no more."""
        if (
            self._runner is not None
            and self._flops is not None
            and self._flops in self._runner.observers
        ):
            self._runner.observers.remove(self._flops)
        self._runner = None

    # Events

    def batch_wait_started(self) -> None:
        self._wait_began = self._clock()

    def batch_wait_ended(self) -> None:
        self.waited += self._clock() - self._wait_began

    def update_started(self) -> None:
        if self._before_update is not None:  # its micro-batches are computed again
            self.tokens = self._before_update
        self._before_update = self.tokens

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        if self._runner is not None:
            self.tokens += self._runner.count_tokens(read)

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self._before_update = None
        self.updates += 1
        self.skipped += not outcome.committed

    # An evaluation or a save is left out of the speed of training; the time left counts it.

    def evaluation_started(self, split: str) -> None:
        self.save_started()

    def evaluation_ended(self, split: str) -> None:
        self.save_ended()

    def save_started(self) -> None:
        if self._depth == 0:
            self._paused_at = self._clock()
        self._depth += 1

    def save_ended(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._aside += self._clock() - self._paused_at

    # Reports

    @property
    def counted_flops(self) -> float | None:
        """FLOPs of a sample, forward and backward, as `FlopsOfSample` counted them.

        `None` before that, where the model is compiled, and where the peak of the device is not known, so that there is nothing to compare
        them with.
        """
        return None if self._flops is None else self._flops.counted

    @property
    def waited_since_report(self) -> float:
        """Seconds since the last report that this rank waited for batches."""
        return self.waited - self._at_report[3]

    def report(
        self, runner: TorchRunner, own: Sequence[float] = ()
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Return the metrics since the last report. One small collective; call it on all ranks.

        Args:
            runner: The runner.
            own: Further numbers of this rank, which all learn; as many on each.

        Returns:
            `skipped_updates` (of this attempt) and the peak memory in GiB, of the rank that has the highest; after updates
            `step_seconds`, `samples_per_second` and `data_share` (share of the time spent waiting for batches, of the rank that waited
            longest, in [0, 1]); where they are known `tokens_per_second`, `eta_seconds`, `model_flops_per_second` and `mfu`. And the
            numbers of the ranks, by rank.
        """
        domain, counts = runner.placement.optimizer, runner.placement.counts_samples
        now = (self._clock(), self.updates, self.tokens, self.waited, self._aside)
        # All counts are from the beginning of the training: what a report needs is their growth.
        elapsed, updates, tokens, waited, aside = (
            new - old for new, old in zip(now, self._at_report)
        )
        train, self._at_report = runner.state.train, now
        samples, self.samples_at_log = train.samples - self.samples_at_log, train.samples
        memory, rows = memory_figures(runner.device), list[list[float]]()
        if domain.size > 1 and not self.adds_ranks:
            tokens = 0.0  # those of the other ranks are not known
        elif domain.size > 1:
            mine = [
                tokens if counts else 0.0,
                waited,
                *(memory.get(name, 0.0) for name in _MEMORY),
                *own,
            ]
            # A sum over a row for each rank: sums and maxima in one collective.
            table = torch.zeros(domain.size, len(mine), dtype=torch.float64)
            table[domain.rank] = torch.tensor(mine, dtype=torch.float64)
            table = domain.all_reduce(table)
            tokens, (_, waited, *peaks) = float(table[:, 0].sum()), table.amax(0).tolist()
            memory = {name: peak for name, peak in zip(_MEMORY, peaks) if peak}
            rows = table[:, 2 + len(_MEMORY) :].tolist() if own else []
        seconds = max(elapsed - aside, 1e-9)
        figures: dict[str, float] = {"skipped_updates": float(self.skipped)}
        if updates:
            figures |= {"step_seconds": seconds / updates, "samples_per_second": samples / seconds}
            figures["data_share"] = min(waited / seconds, 1.0)
        if tokens:
            figures["tokens_per_second"] = tokens / seconds
        # With evaluations and saves, which take time until the end as well.
        done = train.global_step - self._start_step
        if runner.steps is not None and done > 0:
            figures["eta_seconds"] = (
                (now[0] - self._start) / done * max(runner.steps - train.global_step, 0)
            )
        # Of what the user gives for tokens and for samples, the first one that is known counts.
        speeds = (
            (runner.flops_per_token(), tokens / seconds),
            (runner.flops_per_sample(), figures.get("samples_per_second")),
        )
        done_flops = next((flops * speed for flops, speed in speeds if flops and speed), None)
        if done_flops is not None:
            figures["model_flops_per_second"] = done_flops
            if self._peak:
                figures["mfu"] = done_flops / (self._peak * runner.world_size)
        return figures | memory, rows

    def summary(self, runner: TorchRunner) -> str:
        """Return what this attempt did, in one line."""
        elapsed = max(self._clock() - self._start, 1e-9)
        training = max(elapsed - self._aside, 1e-9)
        if not self.updates:
            return f"no update in {elapsed:.1f} s"
        train, plural = runner.state.train, "" if self.updates == 1 else "s"
        samples = train.samples - self._samples_at_start
        return (
            f"{self.updates} update{plural} to step {train.global_step} in {elapsed:.1f} s: {format_count(self.updates / training)} "
            f"updates/s, {format_count(samples / training)} samples/s, {100 * self.waited / training:.0f}% waiting for data, "
            f"{100 * (1 - training / elapsed):.0f}% evaluating and saving, {self.skipped} skipped"
        )


class FlopsOfSample(Observer):
    """Has torch count the FLOPs of the first micro-batch of a training, which computes the same bits; then removes itself.

    Attributes:
        counted: Those of matrix products, convolutions and attentions for a sample, forward and backward; `None` before.
    """

    critical = True

    def __init__(self, runner: TorchRunner) -> None:
        self.counted: float | None = None
        self._runner = runner
        self._counter: Any = None
        self._samples = 0.0

    def update_started(self) -> None:
        self.counted = None  # also where its micro-batches are computed again

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        if self.counted is None and samples:
            from torch.utils.flop_counter import FlopCounterMode

            # Entered and left by hand: the forward and backward are between two events.
            self._samples = samples
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def micro_batch_ended(self) -> None:
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self.counted = int(counter.get_total_flops()) / self._samples

    def update_ended(self, outcome: UpdateOutcome) -> None:
        if self.counted is not None:
            self._runner.observers.remove(self)


def memory_figures(device: torch.device) -> dict[str, float]:
    """Return peaks of memory in GiB: `memory_host_gib` of the process, and of an accelerator what was allocated
    and reserved.

    The counters are kept on the host: nothing waits for the device.

    Args:
        device: The device of this process.
    """
    figures = {}
    counters = memory_stats(device)
    if counters:
        figures["memory_allocated_gib"] = counters["allocated_bytes.all.peak"] / _GIB
        figures["memory_reserved_gib"] = counters["reserved_bytes.all.peak"] / _GIB
    if sys.platform != "win32":
        import resource

        # macOS counts bytes, Linux KiB.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        figures["memory_host_gib"] = peak / _GIB
    return figures


_TERA = 1e12

# Dense peaks in TFLOP/s, in the order (16 bit with the accumulation of the data sheet, TF32, FP32 without tensor cores).
# The data sheets give the tensor-core figures of Ampere and later with sparsity; here they are halved.
_H100_SXM = (989.4, 494.7, 66.9)
_PEAKS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100), and that of the H200
    (r"NVIDIA H200", _H100_SXM),
    (r"NVIDIA H100 80GB HBM3", _H100_SXM),
    (r"NVIDIA H100 PCIe", (756.0, 378.0, 51.2)),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    (r"NVIDIA A100[- ](SXM4|PCIE|SXM|PCIe|80GB PCIe).*", (312.0, 156.0, 19.5)),
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    (r"(Tesla|NVIDIA) V100-SXM2-.*", (125.0, None, 15.7)),
    (r"(Tesla|NVIDIA) V100-PCIE-.*", (112.0, None, 14.0)),
    # https://www.nvidia.com/en-us/data-center/l4/, .../products/a10-gpu/ and .../tesla-t4/
    (r"NVIDIA L4", (121.0, 60.0, 30.3)),
    (r"NVIDIA A10", (125.0, 62.5, 31.2)),
    (r"(Tesla|NVIDIA) T4", (65.0, None, 8.1)),
)
# The 16-bit peak of these is that of fp16; they have no bf16 tensor cores.
_NO_BF16 = re.compile(r".*\b(V100|T4)\b.*")


def peak_flops(
    device_name: str, precision: str | None = None, *, tf32: bool = False
) -> float | None:
    """Return the dense peak of a device in FLOP/s, `None` for one that is not in the table: it is never guessed.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
        precision: `"bf16"`, `"fp16"`, or `None` for 32 bit.
        tf32: Whether 32-bit products may use TF32.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16")
        312000000000000.0
        >>> peak_flops("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is None
        True
    """
    # A slice of a GPU has a part of its peak.
    if " MIG " in device_name or (precision == "bf16" and _NO_BF16.match(device_name)):
        return None
    peaks = next((found for name, found in _PEAKS if re.fullmatch(name, device_name)), None)
    if peaks is None:
        return None
    half, tensor_float, peak = peaks
    if tf32 and tensor_float:
        peak = tensor_float
    if precision in ("bf16", "fp16"):
        peak = half
    return peak * _TERA


def device_peak_flops(device: torch.device, precision: str | None = None) -> float | None:
    """Return the peak of the device of this process, as `peak_flops`; `None` for a CPU."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
