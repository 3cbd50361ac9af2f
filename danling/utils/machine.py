"""What the bits of a result depend on besides the program: threads, torch and the processor."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def processor_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def arithmetic(device: torch.device) -> dict[str, str]:
    """Return what the order and the instructions of this process's arithmetic follow from."""
    on_cuda = device.type == "cuda"
    return {
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "processor": torch.cuda.get_device_name(device) if on_cuda else processor_name(),
    }
