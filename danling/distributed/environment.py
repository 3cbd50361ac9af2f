"""The rank of this process, and the process group that joins the ranks."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from danling.utils.devices import accelerator_type, device_identity
from danling.utils.messages import ranks_named

logger = logging.getLogger("danling")

_SECONDS_BEFORE_REPORT = 10.0
"""How long ranks are awaited before one line says how many have started."""
_LONGEST_PAUSE_SECONDS = 0.5

_VARIABLES = {
    "RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_RANK": 0,
    "LOCAL_WORLD_SIZE": 1,
    "TORCHELASTIC_RESTART_COUNT": 0,
}
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


def check_tasks() -> None:
    """Refuse to train alone as one of several tasks that SLURM has started at once without ranks.

    Raises:
        ValueError: If there are several tasks, and neither RANK nor WORLD_SIZE is set.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    # WORLD_SIZE=1 says that a task trains alone on purpose.
    has_ranks = any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if tasks.isdecimal() and int(tasks) > 1 and not has_ranks:
        raise ValueError(
            f"Expected RANK and WORLD_SIZE in each of the {tasks} tasks that srun has started. Received: SLURM_STEP_NUM_TASKS={tasks} "
            "without them: each task would train a run of one process. Start torchrun in one task on each machine, or set "
            "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID, WORLD_SIZE=$SLURM_NTASKS, MASTER_ADDR and MASTER_PORT in each task. For one "
            "run in each task, as in a sweep, set WORLD_SIZE=1."
        )


def is_first_on_machine() -> bool:
    """Whether this process is the first one of its machine, as its launcher says; without one it is."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def select_device(local_rank: int) -> torch.device:
    """Return the accelerator of `local_rank` and make it current, or the CPU."""
    kind = accelerator_type()
    if kind is None:
        return torch.device("cpu")
    # More processes than devices share them; `_check_shared` refuses that where the backend does.
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def init_process_group(
    launch: LaunchEnvironment,
    device: torch.device,
    *,
    backend: str | None = None,
    init_method: str | None = None,
    timeout_seconds: float | None = None,
) -> bool:
    """Join the process group when there is more than one process. Call on all ranks.

    With an accelerator and no explicit backend, CPU tensors go over gloo and device tensors over its own backend: nccl with CUDA.

    Args:
        launch: The coordinates of this process.
        device: The device of this process.
        backend: A backend string of `torch.distributed`, or `None` to choose by device.
        init_method: Rendezvous URL; `None` reads the environment.
        timeout_seconds: How long the other processes are awaited, and how long a collective may take before it fails; `None` keeps
            torch's default.

    Returns:
        Whether the caller is to call `destroy_process_group` in the end: not where the program made its own group, which is used
        as it is.

    Raises:
        TimeoutError: If a process has not started within `timeout_seconds`.
        ConnectionError: If rank 0 ended meanwhile.
        ValueError: If processes share a device, which nccl refuses in its first collective, or nccl is asked for without a device.
    """
    global _own_group, _users
    if launch.world_size == 1:
        return False
    if dist.is_initialized():
        # A later runner of this process shares the group that an earlier one has made.
        shared = _own_group is not None and dist.group.WORLD is _own_group
        _users += shared
        return shared
    if backend is None:
        backend = "gloo"
        if device.type != "cpu":
            # Gradients are on the device; objects, requests and metrics are on the CPU.
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    serves_cpu = "cpu:" in backend and torch.cuda.is_available()
    if device.type == "cpu" and "nccl" in backend and not serves_cpu:
        raise ValueError(
            f"Expected a backend for the CPU, on which this process trains. Received: backend={backend!r}, and "
            f"torch.cuda.is_available() is {torch.cuda.is_available()}. Leave backend out: nccl is taken with a CUDA device, gloo without."
        )
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    store = _next_store(launch, init_method, timeout or default_pg_timeout, device)
    _check_shared(store, launch, device, backend)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    _own_group = dist.group.WORLD
    _users = 1
    return True


_own_group: dist.ProcessGroup | None = None
_users = 0
"""How many runners of this process use the group that was made here; the last one destroys it."""
_rendezvous: tuple[str, Store] | None = None
_groups_made = 0


def _next_store(
    launch: LaunchEnvironment, init_method: str | None, timeout: timedelta, device: torch.device
) -> Store:
    """Return another store for the next group of this process, when all ranks have it. Call on all ranks."""
    global _rendezvous, _groups_made
    url = init_method or "env://"
    if _rendezvous is None or _rendezvous[0] != url:
        _rendezvous = (url, _open_store(url, launch, timeout))
    # A prefix for each group: under the keys of the last one, all ranks have come already.
    _groups_made += 1
    store = PrefixStore(f"danling-{_groups_made}", _rendezvous[1])
    _claim(store, launch, device)
    _await_all(store, launch, timeout)
    return store


def _claim(store: Store, launch: LaunchEnvironment, device: torch.device) -> None:
    """Note which accelerator this rank takes, and whether another rank has taken it. Before all ranks have come."""
    if device.type != "cpu":
        key = f"device/{socket.gethostname()}/{device_identity(device)}"
        # Not counted on each machine: launchers may show each process another one as its only device.
        owner = bytes(store.compare_set(key, "", str(launch.rank))).decode()
        if owner != str(launch.rank):
            store.set(
                "shared", f"ranks {owner} and {launch.rank} have {device} of {socket.gethostname()}"
            )


def _check_shared(
    store: Store, launch: LaunchEnvironment, device: torch.device, backend: str
) -> None:
    """Refuse processes that share a device over nccl, and log it where another backend takes it. After all ranks have come."""
    if device.type == "cpu" or not store.check(["shared"]):
        return
    shared = bytes(store.get("shared")).decode()
    # A backend is one name, or one for each kind of device: cpu:gloo,cuda:nccl.
    own = dict(pair.partition(":")[::2] for pair in backend.split(",")).get(device.type, backend)
    if own == "nccl":
        raise ValueError(
            f"Expected a device for each process with nccl, which takes one process a device. Received: {shared}. Start at most as many "
            "processes on a machine as it has devices, or set backend='gloo', which is slower."
        )
    if launch.rank == 0:
        logger.warning(
            "Processes share a device: %s. They take turns on it, and share its memory.", shared
        )


def _open_store(url: str, launch: LaunchEnvironment, timeout: timedelta) -> Store:
    """Return the store of a rendezvous URL, without waiting for all ranks to open it."""
    parts = urlparse(url)
    in_environment = parts.scheme == "env"
    # torchrun's agent has the store, and a query has options that only torch's own rendezvous reads.
    is_plain = (in_environment or parts.scheme == "tcp") and not parts.query
    if not is_plain or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(iter(rendezvous(url, launch.rank, launch.world_size, timeout=timeout)))
        opened: Store = store
        return opened
    missing = [
        name
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if in_environment and not os.environ.get(name)
    ]
    if missing:
        raise ValueError(
            f"Expected the launcher to set {' and '.join(missing)}, with which the {launch.world_size} processes find each other. "
            "Received: none. Launch with torchrun, or set it."
        )
    host, port = parts.hostname, parts.port
    if in_environment:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not host or port is None:
        raise ValueError(
            f"Expected init_method to be 'tcp://HOST:PORT'. Received: init_method={url!r}. Add both."
        )
    if launch.rank != 0:
        _await(
            lambda: _answers(host, port),
            timeout,
            report=lambda: (
                f"Rank 0, the first of {launch.world_size} processes, does not answer at {host}:{port} yet."
            ),
            failure=lambda: (
                f"Expected rank 0 to answer at {host}:{port} within {timeout.total_seconds():g} s (comm.init_timeout_seconds). Received: "
                "no answer. Start it, or check MASTER_ADDR and MASTER_PORT."
            ),
        )
    # The others are awaited in Python, see `_await_all`. Stores of one process at one port share a server.
    return TCPStore(
        host,
        port,
        launch.world_size,
        is_master=launch.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_LONGEST_PAUSE_SECONDS).close()
    except OSError:
        return False
    return True


def _await_all(store: Store, launch: LaunchEnvironment, timeout: timedelta) -> None:
    """Wait until all ranks have come here; one of those that wait logs how many there are. Call on all ranks."""
    size = launch.world_size
    store.set(f"started/{launch.rank}", "yes")
    if store.add("started", 1) == size:
        store.set("all", "yes")

    def missing() -> list[int]:
        return [rank for rank in range(size) if not store.check([f"started/{rank}"])]

    def report() -> str:
        is_first = (
            bytes(store.compare_set("reports", "", str(launch.rank))) == str(launch.rank).encode()
        )
        return (
            f"{size - len(missing())} of {size} processes have started. Missing: {ranks_named(missing())}."
            if is_first
            else ""
        )

    try:
        _await(
            lambda: store.check(["all"]),
            timeout,
            report=report,
            failure=lambda: (
                f"Expected {size} processes to start within {timeout.total_seconds():g} s (comm.init_timeout_seconds). Received: "
                f"{size - len(missing())}. Missing: {ranks_named(missing())}. Start them, or give them more time."
            ),
        )
    except dist.DistNetworkError as error:
        raise ConnectionError(
            "The process that joins the ranks, which is rank 0 or the agent of torchrun, ended while this rank waited for the others to "
            "start. Its own error has the reason."
        ) from error


def _await(
    has_come: Callable[[], bool],
    timeout: timedelta,
    *,
    report: Callable[[], str],
    failure: Callable[[], str],
) -> None:
    """Wait for something in Python, so that signals are handled meanwhile; log `report` once, or raise `failure` at the end."""
    began = time.monotonic()
    # Not at once, since ranks of a large job start over seconds.
    has_reported = False
    while not has_come():
        waited = time.monotonic() - began
        if waited >= timeout.total_seconds():
            raise TimeoutError(failure())
        if waited >= _SECONDS_BEFORE_REPORT and not has_reported:
            has_reported = True
            if text := report():
                logger.warning(text)
        # Often at first, since ranks usually start within milliseconds of each other.
        time.sleep(min(max(waited / 10, 0.005), _LONGEST_PAUSE_SECONDS))


def set_collective_timeout(
    seconds: float, groups: Iterable[dist.ProcessGroup | None] = (None,)
) -> None:
    """Set how long a collective may take from now on. Call on all ranks.

    Args:
        seconds: The new limit, in place of the one the groups were made with.
        groups: The groups; `None` is the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    # Public since torch 2.15, which warns of the private name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        set_timeout(timedelta(seconds=seconds), group)


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
