"""Several processes on this machine, as the benchmarks of layouts start them."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
from torch.multiprocessing.spawn import start_processes


def run_on_ranks(function: Callable[..., None], *arguments: object, world_size: int) -> None:
    """Call `function(rank, *arguments)` in so many processes, which are set up as a launcher does it, and wait for them.

    They are forks, and so have torch from the start: call this before anything is computed in this process.

    Args:
        function: A function of a module.
        arguments: What it takes.
        world_size: Number of processes.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
    start_processes(
        _as_rank, (function, world_size, port, arguments), nprocs=world_size, start_method="fork"
    )


def _as_rank(
    rank: int,
    function: Callable[..., None],
    world_size: int,
    port: int,
    arguments: tuple[object, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    function(rank, *arguments)
