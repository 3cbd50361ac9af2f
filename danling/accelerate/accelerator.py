"""An accelerator: how Accelerate is imported, told where it stands, checked and forgotten again.

The only module that knows Accelerate's shared state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed as dist

from danling.distributed import LaunchEnvironment

from .settings import AccelerateSettings, check_arguments

_users = 0
"""How many runners of this process use Accelerate's shared state; the last one resets it."""


def import_accelerate() -> Any:
    """Import Accelerate and return it."""
    if find_spec("accelerate") is None:
        raise ImportError(
            "Expected the package accelerate for stack='accelerate'. Received: it is not installed. Install it: "
            "pip install accelerate, or pip install -e '.[accelerate]' in a clone of this library."
        )
    return import_module("accelerate")


def open_accelerator(settings: AccelerateSettings, launch: LaunchEnvironment, more: Mapping[str, object]) -> Any:
    """Return an accelerator that stands where this process does. Call on all ranks, after the process group was joined."""
    global _users
    accelerate = import_accelerate()
    if _users == 0 and import_module("accelerate.state").is_initialized():
        raise ValueError(
            "Expected the runner to make the Accelerator of this process, whose state all of them share. Received: one that was made "
            "before. Use runner.accelerator instead of it."
        )
    check_arguments(more)
    with _own_place(launch):
        accelerator = accelerate.Accelerator(
            cpu=settings.cpu or torch.accelerator.current_accelerator(check_available=True) is None,
            mixed_precision="fp8" if settings.fp8 else "no",
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            **more,
        )
    _users += 1
    try:
        check_place(accelerator, settings, launch)
    except BaseException:
        release_accelerator()
        raise
    return accelerator


@contextmanager
def _own_place(launch: LaunchEnvironment) -> Iterator[None]:
    """Let Accelerate take one process for one process, also under a launcher: it would make a group of it, which nobody leaves."""
    hidden = (
        {} if launch.world_size > 1 else {name: os.environ.pop(name) for name in ("LOCAL_RANK",) if name in os.environ}
    )
    try:
        yield
    finally:
        os.environ.update(hidden)


def check_place(accelerator: Any, settings: AccelerateSettings, launch: LaunchEnvironment) -> None:
    """Refuse an accelerator that stands elsewhere than its process, or trains otherwise than was asked."""
    place, own = (accelerator.num_processes, accelerator.process_index), (launch.world_size, launch.rank)
    if place != own:
        raise ValueError(
            f"Expected Accelerate to know all processes that were launched. Received: num_processes={place[0]}, process_index={place[1]} "
            f"with WORLD_SIZE={own[0]}, RANK={own[1]}: its ranks would train alone. Start with torchrun, and make no PartialState of "
            "your own before the runner."
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if not (kind.startswith("MULTI_") if launch.world_size > 1 else kind == "NO"):
        raise ValueError(
            f"Expected one copy of the model a process. Received: distributed_type={kind} with WORLD_SIZE={launch.world_size}. Set "
            "stack='parallel' or stack='deepspeed', which divide a model."
        )
    if settings.fp8 and accelerator.mixed_precision != "fp8":
        raise ValueError(
            f"Expected a device that can train in fp8. Received: {accelerator.device}, where Accelerate would take "
            f"mixed_precision={accelerator.mixed_precision!r} instead. Set precision='bf16'."
        )
    if launch.world_size > 1:
        check_backend(accelerator.device.type, str(dist.get_backend_config()))


def check_backend(device_type: str, backends: str) -> None:
    """Refuse a process group that has no collectives for a device."""
    if device_type not in [pair.partition(":")[0] for pair in backends.split(",")]:
        usual = dist.Backend.default_device_backend_map.get(device_type, "NAME")
        raise ValueError(
            f"Expected a process group with collectives for the device that Accelerate picked. Received: device={device_type!r}, "
            f"backend={backends!r}. Set backend='cpu:gloo,{device_type}:{usual}'."
        )


def release_accelerator() -> None:
    """Let Accelerate forget this process's accelerator, if no other runner uses it, so that another one can follow."""
    global _users
    _users -= 1
    if _users == 0:
        state = import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
