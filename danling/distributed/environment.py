"""The rank of this process, and the process group that joins the ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
"""Variables of the environment in the order of the fields of `LaunchEnvironment`, and their defaults."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The coordinates that `torchrun` puts into the environment.

    Attributes:
        rank: Global rank, 0 when the process was started alone.
        world_size: Number of processes, 1 when the process was started alone.
        local_rank: Rank on this machine.
        local_world_size: Number of processes on this machine.
        restart_count: How often torchrun has restarted the group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read the variables that `torchrun` sets.

        Raises:
            ValueError: If a variable is not an integer, or the rank is outside the world.
        """
        values = {}
        for name, default in _VARIABLES.items():
            text = os.environ.get(name, "")
            try:
                values[name] = int(text) if text else default
            except ValueError:
                raise ValueError(
                    f"Expected the environment variable {name} to be an integer. Received: {name}={text!r}."
                ) from None
        if not 0 <= values["RANK"] < values["WORLD_SIZE"]:
            raise ValueError(
                f"Expected 0 <= RANK < WORLD_SIZE. Received: RANK={values['RANK']}, WORLD_SIZE={values['WORLD_SIZE']}. "
                "Launch with torchrun, or unset both."
            )
        return cls(*values.values())


def is_first_on_machine() -> bool:
    """Whether this process is the first one of its machine, as its launcher says; without one it is."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def select_device(local_rank: int) -> torch.device:
    """Return the accelerator of `local_rank` and make it current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init_process_group(
    launch: LaunchEnvironment,
    device: torch.device,
    *,
    backend: str | None = None,
    init_method: str | None = None,
    timeout_seconds: float | None = None,
) -> bool:
    """Join the process group when there is more than one process. Call on all ranks.

    With CUDA and no explicit backend, CPU tensors go over gloo and device tensors over nccl.

    Args:
        launch: The coordinates of this process.
        device: The device of this process.
        backend: A backend string of `torch.distributed`, or `None` to choose by device.
        init_method: Rendezvous URL; `None` reads the environment.
        timeout_seconds: How long a collective may take before it fails; `None` keeps torch's default.

    Returns:
        Whether the caller is to call `destroy_process_group` in the end: not where the program made its own group, which is used
        as it is.
    """
    global _own_group, _users
    if launch.world_size == 1:
        return False
    if dist.is_initialized():
        shared = _own_group is not None and dist.group.WORLD is _own_group
        _users += shared
        return shared
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend, store=_next_store(launch, init_method), rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    _own_group, _users = dist.group.WORLD, 1
    return True


_own_group: dist.ProcessGroup | None = None
_users = 0
"""How many runners of this process use the group that was made here; the last one destroys it."""
_rendezvous: tuple[str, Store] | None = None
_groups_made = 0


def _next_store(launch: LaunchEnvironment, init_method: str | None) -> Store:
    """Return another store for the next group of this process."""
    global _rendezvous, _groups_made
    url = init_method or "env://"
    if _rendezvous is None or _rendezvous[0] != url:
        store, _, _ = next(iter(rendezvous(url, launch.rank, launch.world_size)))
        _rendezvous = (url, store)
    _groups_made += 1
    return PrefixStore(f"danling-{_groups_made}", _rendezvous[1])


def set_collective_timeout(seconds: float, groups: Iterable[dist.ProcessGroup | None] = (None,)) -> None:
    """Set how long a collective may take from now on. Call on all ranks.

    Args:
        seconds: The new limit, in place of the one the groups were made with.
        groups: The groups; `None` is the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    for group in groups:
        # The only way that torch offers; its own name says that it may move.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def collective_timeout(device: torch.device) -> float | None:
    """Return how many seconds a collective of the default group may take, `None` where that is not known.

    Args:
        device: Device whose tensors it moves.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.group.WORLD is None:
        return None
    try:
        options: Any = dist.group.WORLD._get_backend(device).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError, ValueError):
        return None


def destroy_process_group() -> None:
    """Leave the process group, if there is one that no other code uses.

    Modules that still hold a reducer when the group goes can abort the process on exit, so garbage is collected first.
    """
    global _own_group, _users
    if not (dist.is_available() and dist.is_initialized()):
        return
    if dist.group.WORLD is _own_group:
        _users -= 1
        if _users > 0:
            return
    _own_group, _users = None, 0
    gc.collect()
    dist.destroy_process_group()
