"""What a run was made with besides its settings and its code: versions, devices, threads, switches of torch, variables."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from danling.utils.files import read_text, write_atomically
from danling.utils.plain import flatten, json_text, parse_json
from danling.utils.process import processor_name

FILE = "environment.json"
"""Its name among the metadata of a run."""
_VARIABLES = re.compile(
    r"((OMP|MKL|OPENBLAS|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH)_[A-Z0-9_]+|WORLD_SIZE|PYTHONHASHSEED)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
# They are other ones at each start, and change nothing.
_ADDRESSES = re.compile(r"TORCHELASTIC_.*|TORCH_FR_.*|.*_(PORT|ADDR|ID|FILE|DIR)")


def environment_of_run() -> dict[str, Any]:
    """Return the facts as plain values, nested."""
    import torch  # what only reads the facts starts without it

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not _SECRET.search(name) and not _ADDRESSES.fullmatch(name)
    }
    versions = {
        str(found.metadata["Name"]).lower(): found.version for found in distributions() if found.metadata["Name"]
    }
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "gpus": gpus,
        "torch": {
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": dict(sorted(versions.items())),
        "variables": variables,
    }


def write_environment(metadata: Path) -> None:
    """Write the facts into the metadata directory of a run."""
    metadata.mkdir(parents=True, exist_ok=True)
    write_atomically(metadata / FILE, json_text(environment_of_run()))


def read_environment(run: Path) -> dict[str, Any]:
    """Return what a run was made with, by dotted key; empty where it was not noted."""
    file = run / "metadata" / FILE
    try:
        found = parse_json(read_text(file))
    except (OSError, ValueError):
        return {}
    return flatten(found, keeps_empty=True) if isinstance(found, Mapping) else {}
