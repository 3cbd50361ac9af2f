"""The compiler that torch needs for a backend and a device, and whether it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def cxx_command() -> str:
    """Return the C++ compiler that torch's inductor calls: that of `CXX`, else g++, or clang++ on macOS."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def cxx_version(command: str | None = None) -> str | None:
    """Return the first line of what a C++ compiler says of itself, `None` where there is none that runs."""
    found = shutil.which(command or cxx_command())
    if found is None:
        return None
    try:
        said = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.splitlines()), found)


def check_compiler(backend: str | None, device: str, *, setting: str, otherwise: str) -> None:
    """Refuse a machine that has no compiler for a backend: without this, the first update fails after a minute of compilation.

    Args:
        backend: `compile.backend`.
        device: Kind of the device.
        setting: What asks for compiled code.
        otherwise: What trains without it.
    """
    if backend not in (None, "inductor") or "1" in map(os.environ.get, _SWITCHES):
        return
    fix = f"or set compile.backend='aot_eager', which needs none, or {otherwise}."
    commands = [cxx_command()]
    if device == "cuda":
        from torch.utils._triton import has_triton  # only here: it looks at the device

        if not has_triton():
            raise ValueError(
                f"Expected triton for {setting} on a GPU. Received: none that works. Install it (pip install triton), {fix}"
            )
        # Triton compiles with a C compiler.
        commands += [os.environ.get("CC") or "gcc", "clang"]
    if not any(map(cxx_version, commands)):
        raise ValueError(
            f"Expected a C++ compiler for {setting}. Received: none; {commands[0]!r} does not run. Install one (apt install g++), "
            f"name it in the environment variable CXX, {fix}"
        )
