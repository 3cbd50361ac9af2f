"""Print what a bug report should say: versions, system, devices.

torch is not imported, so it also works where torch does not.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from danling import __version__

from .output import OK, add_json, print_json

PACKAGES = (
    *("torch", "torchdata", "chanfig", "pyyaml", "tqdm", "numpy"),
    # What torch was built for.
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    # Only parts of the library use these.
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "trackio",
    "matplotlib",
    "safetensors",
    "torchmetrics",
    "deepspeed",
    "accelerate",
    "torchft-nightly",
    "mooncake-transfer-engine-non-cuda",
)
_VARIABLES = re.compile(
    r"(OMP|MKL)_NUM_THREADS|(CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHFT|PYTORCH)_[A-Z0-9_]+|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|DS_ACCELERATOR|ACCELERATE_[A-Z0-9_]+"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the environment."""
    facts = environment()
    if options.json:
        print_json(facts)
        return OK
    for name, value in facts.items():
        if not isinstance(value, dict):
            print(f"{name}: {value}")
            continue
        print(f"{name}:")
        for key, item in value.items():
            print(f"  {key}: {'not installed' if item is None else item}")
    return OK


def environment() -> dict[str, object]:
    """Return the facts as plain values."""
    variables = {
        k: v
        for k, v in sorted(os.environ.items())
        if _VARIABLES.fullmatch(k) and not _SECRET.search(k)
    }
    # Those that this process may use, which macOS does not say.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    try:
        memory = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        memory = "unknown"
    return {
        "danling": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu_count": cores,
        "memory": memory,
        "gpus": ", ".join(_gpus()) or "none",
        "packages": {name: _installed(name) for name in PACKAGES},
        "variables": variables,
    }


def _installed(package: str) -> str | None:
    """Return the version of an installed package, `None` when there is none; `unknown` where its metadata cannot be read."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
    except (KeyError, UnicodeDecodeError, OSError):
        return "unknown"


def _gpus() -> list[str]:
    """Return the NVIDIA devices that the driver names."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
