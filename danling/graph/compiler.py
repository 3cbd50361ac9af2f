"""The compiler that torch needs for a backend and a device, and whether it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_NEEDS_NONE = ("aot_eager", "aot_eager_decomp_partition", "eager")


def cxx_command() -> str:
    """Return the C++ compiler that torch's inductor calls: that of `CXX`, else g++, or clang++ on macOS."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def cxx_version(command: str | None = None) -> str | None:
    """Return the first line of what a C++ compiler says of itself, `None` where there is none that runs."""
    found = shutil.which(command or cxx_command())
    if found is None:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.splitlines()), found)


def check_compiler(backend: str | None, device: str) -> None:
    """Refuse a machine that has no compiler for a backend."""
    if backend in _NEEDS_NONE:
        return
    mend = "or set compile.backend='aot_eager', which needs none, or stack='ddp'."
    if device == "cuda":
        from torch.utils._triton import has_triton  # only here: it looks at the device

        if not has_triton():
            raise ValueError(
                f"Expected triton for stack='graph' on a GPU, which compiles forward and loss. Received: none that works. Install it "
                f"(pip install triton), {mend}"
            )
    if cxx_version() is None:
        raise ValueError(
            f"Expected a C++ compiler for stack='graph', which compiles forward and loss. Received: none; {cxx_command()!r} does not run. "
            f"Install one (apt install g++), name it in the environment variable CXX, {mend}"
        )
