"""What compiled code depends on: the folder that it lies in is named after it."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def fingerprint(
    model: nn.Module,
    *,
    loss: Iterable[object],
    settings: Mapping[str, object],
    policy: str,
    device: torch.device,
) -> dict[str, str]:
    """Return what the compiled code of a model and its loss depends on, part by part.

    The sizes of batches are no part of it: torch's own keys tell the graphs of one folder apart.
    """
    sizes = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in _tensors(model)]
    return {
        "torch": f"{torch.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}",
        "device": _device(device),
        "model": _digest([*_sources(type(module) for module in model.modules()), *sizes]),
        "loss": _digest(_sources(loss)),
        "compile": _digest(f"{name}={value!r}" for name, value in sorted(settings.items())),
        "policy": policy,
    }


def digest_of(parts: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits for a fingerprint."""
    return _digest(f"{name}: {value}" for name, value in sorted(parts.items()))


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, {major}.{minor}, CUDA {torch.version.cuda}"
    # Code for a CPU uses every instruction that the machine has: on another one it may be an illegal one.
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {_digest([_cpu_flags()])}"


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources(things: Iterable[object]) -> Iterable[str]:
    seen = set()
    for thing in things:
        kind = thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)
        for part in inspect.getmro(kind) if isinstance(kind, type) else (kind,):
            if part not in seen:
                seen.add(part)
                yield _source(part)


def _source(part: Callable[..., Any] | type) -> str:
    name = f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', part)}"
    if name.startswith(("torch.", "builtins.")):
        return name
    try:
        return f"{name}\n{inspect.getsource(part)}"
    except (OSError, TypeError):
        # Typed in, or made by another function.
        code = getattr(part, "__code__", None)
        return f"{name}\n{code.co_code.hex()} {code.co_names}" if code is not None else name


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
