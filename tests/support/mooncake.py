"""The real server of Mooncake on the loopback, and a process that lends memory to it.

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

with mooncake_master() as (master, metrics), lender(master):
    store = MooncakeStore(master, metrics=metrics)
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from .job import Job
from .patience import patience
from .processes import free_port


def _why_not() -> str:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake cannot be imported: {error}"
    return "" if _program("mooncake_master") else "mooncake_master is not there"


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


WHY_NOT = _why_not()
"""Why Mooncake does not run here, empty where it does."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, and that the kernel gives to no connection before a server listens there."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@contextmanager
def mooncake_master() -> Iterator[tuple[str, str]]:
    """Run a server, and yield its address and that of its metrics."""
    rpc, metrics = free_ports(2)
    options = [
        f"--rpc_port={rpc}",
        f"--metrics_port={metrics}",
        "--rpc_thread_num=2",
        "--rpc_address=127.0.0.1",
    ]
    with Job([_program("mooncake_master"), *options]) as job:
        for port in (rpc, metrics):
            job.wait_until(partial(_answers, port), 30.0)
        yield f"127.0.0.1:{rpc}", f"127.0.0.1:{metrics}"


@contextmanager
def lender(master: str, size: str = "64MB") -> Iterator[Job]:
    """Run a process that lends memory, and yield it when the server knows of it."""
    (port,) = free_ports(1)
    options = [
        f"--master_server_address={master}",
        f"--global_segment_size={size}",
        f"--port={port}",
    ]
    command = [
        _program("mooncake_client"),
        "--host=127.0.0.1",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
    ]
    with Job([*command, *options]) as job:
        job.wait_until(partial(_answers, port), 30.0)
        yield job


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), patience(1.0)).close()
    except OSError:
        time.sleep(0.01)
        return False
    return True
