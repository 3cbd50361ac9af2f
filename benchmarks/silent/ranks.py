"""Ranks of a script as forks of this process, which has torch loaded: they start in a few milliseconds."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

_SECONDS = 60.0


class RankFailed(RuntimeError):
    """A rank ended with an error, or did not end in time."""


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    directory: Path,
    *,
    world: int = 2,
    lines: int | None = None,
    begin: Callable[[int], None] | None = None,
) -> list[str]:
    """Run a script on some ranks, as torchrun does, and return the lines that rank 0 has printed.

    Args:
        script: The script.
        arguments: Its arguments.
        directory: The working directory of the ranks.
        world: Number of ranks.
        lines: Kill the ranks by SIGKILL once rank 0 has printed so many lines.
        begin: Called in each rank, with its number, before the script.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    for rank in range(world):
        _output(directory, rank).unlink(missing_ok=True)
    sys.stdout.flush()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            _be_rank(script, arguments, directory, {**place, **_numbers(rank, world)}, rank, begin)
            code = 0
        except BaseException:
            sys.stdout.write(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    try:
        _wait(pids, directory, lines)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return _printed(directory)


def _numbers(rank: int, world: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return {**sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _be_rank(
    script: Path,
    arguments: Sequence[str],
    directory: Path,
    environment: dict[str, str],
    rank: int,
    begin: Callable[[int], None] | None,
) -> None:
    sys.path.insert(0, os.fspath(script.parent))
    os.chdir(directory)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.stdout = open(_output(directory, rank), "w", buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    if begin is not None:
        begin(rank)
    runpy.run_path(str(script), run_name="__main__")
    torch.distributed.barrier()  # rank 0 has the store, which others may still ask


def _wait(pids: list[int], directory: Path, lines: int | None) -> None:
    """Wait until all have ended, which removes them from the list, or until rank 0 has printed enough."""
    end = time.monotonic() + _SECONDS
    failed: list[int] = []
    ranks = {pid: rank for rank, pid in enumerate(pids)}
    while pids and not failed:
        if lines is not None and len(_printed(directory)) >= lines:
            return
        for pid in list(pids):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                pids.remove(pid)
                failed += [ranks[pid]] if status else []
        if time.monotonic() > end:
            raise RankFailed(
                f"Expected the ranks to end within {_SECONDS:g} s. Received: ranks that run. See {directory}."
            )
        time.sleep(0.002)
    if failed:
        raise RankFailed(
            f"Expected the ranks to end with 0. Received:\n{_output(directory, failed[0]).read_text()}"
        )


def _output(directory: Path, rank: int) -> Path:
    return directory / f"output-{rank}.txt"


def _printed(directory: Path) -> list[str]:
    output = _output(directory, 0)
    return output.read_text().splitlines() if output.exists() else []
