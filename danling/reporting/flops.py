"""How much arithmetic an update is, and how much the device could do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

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


def counted(function: Callable[[], object]) -> int:
    """Run a function and return the FLOPs of its matrix products, convolutions and attentions, backward included.

    The operations are the same ones, so that the result of a run does not change.

    Args:
        function: What is run once, such as forward and backward of a batch.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


class ModelFlops:
    """What the model computes for a sample, counted in the first micro-batch of training, and its share of what the devices can do.

    Attributes:
        peak: What one device could do at most, in FLOP/s; `None` when it is not known.
        counted: FLOPs of a sample, forward and backward, as they were counted; `None` before.
        counts_next: Whether the next micro-batch is to be run by `count`.
    """

    def __init__(self) -> None:
        self.peak: float | None = None
        self.counted: float | None = None
        self.counts_next = False

    def begin(self, peak: float | None, *, known: bool, countable: bool) -> None:
        """Say at the beginning of a training what is known.

        Args:
            peak: What one device could do at most, in FLOP/s; `None` when it is not known.
            known: Whether the FLOPs of a token or a sample are known already.
            countable: Whether the operations of the model can be counted.
        """
        self.peak = peak
        # Without a peak to compare with nothing is worth the slow first micro-batch.
        self.counts_next = not known and countable and peak is not None

    def count(self, run: Callable[[], object], samples: float) -> None:
        """Run a micro-batch and count its operations.

        Args:
            run: Its forward and backward.
            samples: Number of its samples, above 0.
        """
        self.counts_next = False
        self.counted = counted(run) / samples

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
