"""Which processes a process has started, and how to end them (Linux; elsewhere the tree is reported empty)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Make processes whose parent dies children of this process, so that a test that leaves them behind is found out."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int, *, without: Iterable[int] = ()) -> dict[int, str]:
    """Return the living descendants of a process: command line by process id."""
    children: dict[int, list[int]] = {}
    for pid, (parent, state) in _process_table().items():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        offspring = children.get(pending.pop(), [])
        found += offspring
        pending += offspring
    ignored = set(without)
    return {pid: _command_line(pid) for pid in found if pid not in ignored}


def offspring(root: int, *, without: Iterable[int] = (), since: float = -2.0) -> dict[int, str]:
    """Return what `descendants` does from a few files, not one of each process of the machine: for what every test asks.

    A process may be missed at the instant at which a sibling of it is gone: who compares two answers goes by `since`.
    """
    found: list[int] = []
    pending = [root]
    while pending:
        living = [pid for pid in _children(pending.pop()) if _is_alive(pid)]
        found += living
        pending += living
    ignored = set(without)
    return {pid: _command_line(pid) for pid in found if pid not in ignored and seconds_of_start(pid) >= since}


def seconds_since_boot() -> float:
    """Return the time by which the kernel notes the start of processes, in its steps."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS) / _TICKS if sys.platform == "linux" else 0.0


def seconds_of_start(pid: int) -> float:
    """Return when a process began, as `seconds_since_boot` tells; -1 where it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / _TICKS
    return -1.0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        ]
    return []


def _process_table() -> dict[int, tuple[int, str]]:
    """Return (parent, state) by process id."""
    table: dict[int, tuple[int, str]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                text = os.read(file, 1024)
            finally:
                os.close(file)
            # The name stands in brackets and may contain spaces and brackets itself.
            state, parent = text.rpartition(b")")[2].split(maxsplit=2)[:2]
            table[int(name)] = (int(parent), state.decode())
    return table


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_tree(root: int, *, timeout: float = 5.0) -> None:
    """Kill a process and all its descendants, also those that start while this runs."""
    end = time.monotonic() + timeout
    # torchrun puts each worker into a session of its own, so killing a process group would miss them.
    victims = [root, *descendants(root)]
    while victims and time.monotonic() < end:
        kill_all(victims)
        time.sleep(0.02)
        known, victims = victims, [pid for pid in victims if _is_alive(pid)]
        victims += [pid for parent in known for pid in descendants(parent)]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def reap() -> None:
    """Collect ended children that nobody waits for; needed once orphans are adopted."""
    for pid in _children(os.getpid()):
        if not _is_alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
