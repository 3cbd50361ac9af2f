"""How fast the run is, what it waits for and how long it will take."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from danling.utils.messages import format_count
from danling.utils.protocols import ReductionDomain

_GIB = 2**30
_MEMORY = ("memory_host_gib", "memory_allocated_gib", "memory_reserved_gib")


@dataclass(slots=True)
class Shared:
    """What the ranks know of each other when a log is due.

    Attributes:
        tokens: Tokens of all ranks since the last report.
        waited: Seconds since then that the rank waited for batches which waited longest; the others waited for it.
        memory: Peaks of the rank that has the highest, as `memory_figures`.
        own: The contributions of the ranks, by rank; empty without any.
    """

    tokens: float
    waited: float
    memory: dict[str, float] = field(default_factory=dict)
    own: list[list[float]] = field(default_factory=list)


class Telemetry:
    """Figures of the updates between two logs, from clock readings and host numbers.

    The calls of each update add plain numbers; everything else is computed when a log is due. Nothing here waits for the device or
    communicates before that: then `share` is one collective, and a `grad_norm` on the device is read in `report`.

    Args:
        total_steps: Updates of the whole run; `None` when not known, then no time left is given.
        global_step: Updates done before this attempt.
        device: Device whose memory is reported; `None` for none.
        clock: Seconds, monotonic.

    Examples:
        >>> telemetry = Telemetry(total_steps=1000)
        >>> telemetry.stepped()
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
        self._pauses = 0
        self._wait_began = self._paused_at = self._start
        self._all_waited = 0.0
        self._all_aside = 0.0

    def wait_started(self) -> None:
        """Say that the loop asks for the next batch."""
        self._wait_began = self.clock()

    def wait_ended(self) -> None:
        """Say that the batch is there, or that there is none."""
        self._waited += self.clock() - self._wait_began

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

    def pause(self) -> None:
        """Leave what happens until `resume` (an evaluation, a save) out of the speed of training; the time left counts it."""
        if self._pauses == 0:
            self._paused_at = self.clock()
        self._pauses += 1

    def resume(self) -> None:
        """End a pause; of pauses within each other the outermost one counts."""
        self._pauses -= 1
        if self._pauses == 0:
            self._aside += self.clock() - self._paused_at

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


def peak_flops(device_name: str, precision: str | None = None, *, tf32: bool = False) -> float | None:
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
    if " MIG " in device_name or (precision == "bf16" and _NO_BF16.match(device_name)):
        return None
    for pattern, (half, tensor_float, single) in _PEAKS:
        if re.fullmatch(pattern, device_name):
            peak = half if precision in ("bf16", "fp16") else tensor_float if tf32 and tensor_float else single
            return peak * _TERA
    return None


def device_peak_flops(device: torch.device, precision: str | None = None) -> float | None:
    """Return the peak of the device of this process, as `peak_flops`; `None` for a CPU."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)


class ModelFlops:
    """What the model computes for a sample, counted in the first micro-batch of training, and its share of what the devices can do.

    The operations of a counted micro-batch are the same ones, so that the result of a run does not change.

    Attributes:
        peak: What one device could do at most, in FLOP/s; `None` when it is not known.
        counted: FLOPs of a sample in matrix products, convolutions and attentions, forward and backward; `None` before they are counted.
        counts_next: Whether the next micro-batch is counted.
    """

    def __init__(self) -> None:
        self.peak: float | None = None
        self.counted: float | None = None
        self.counts_next = False
        self._counter: Any = None
        self._samples = 0.0

    def begin(self, peak: float | None, *, known: bool, countable: bool) -> None:
        """Log the beginning of a training.

        Args:
            peak: What one device could do at most, in FLOP/s; `None` when it is not known.
            known: Whether the FLOPs of a token or a sample are known already.
            countable: Whether the operations of the model can be counted.
        """
        self.peak = peak
        # Without a peak to compare with nothing is worth the slow first micro-batch.
        self.counts_next = not known and countable and peak is not None

    def micro_batch_started(self, samples: float) -> None:
        """Begin to count the operations of a micro-batch with samples, if it is to be counted."""
        if self.counts_next and samples:
            from torch.utils.flop_counter import FlopCounterMode

            self.counts_next, self._samples = False, samples
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def micro_batch_ended(self) -> None:
        """Keep what was counted."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self.counted = int(counter.get_total_flops()) / self._samples

    def usage(
        self, pace: Mapping[str, float], *, per_token: float | None, per_sample: float | None, devices: int
    ) -> dict[str, float]:
        """Return `model_flops_per_second` over all devices, and as `mfu` its share of their peak, where they are known.

        Args:
            pace: Speeds as `Telemetry.report` gives them.
            per_token: FLOPs of a token, `None` when not known.
            per_sample: FLOPs of a sample; read where a token's are not known.
            devices: Number of devices that work on the model.
        """
        for per_unit, speed in (
            (per_token, pace.get("tokens_per_second")),
            (per_sample, pace.get("samples_per_second")),
        ):
            if per_unit and speed:
                usage = {"model_flops_per_second": per_unit * speed}
                if self.peak:
                    usage["mfu"] = per_unit * speed / (self.peak * devices)
                return usage
        return {}
