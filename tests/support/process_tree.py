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


def descendants(root: int, *, without: Iterable[int] = (), since: float = 0.0) -> dict[int, str]:
    """Return the living descendants of a process that began after a time of `seconds_since_boot`: command line by process id."""
    found = _below(root)
    # The kernel may leave one out of a list while another one ends: two looks that agree have left out none.
    for _ in range(20):
        before, found = found, _below(root)
        if before == found:
            break
    ignored = set(without)
    return {
        pid: _command_line(pid)
        for pid, began in found.items()
        if pid not in ignored and began >= since
    }


def seconds_since_boot() -> float:
    """Return the time by which the kernel notes the start of processes, in its steps."""
    return (
        int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS) / _TICKS
        if sys.platform == "linux"
        else 0.0
    )


def _below(root: int) -> dict[int, float]:
    """Return when the living descendants of a process began, from few files: every test asks, and a machine has many processes."""
    found: dict[int, float] = {}
    pending = [root]
    while pending:
        for pid in _children(pending.pop()):
            with contextlib.suppress(OSError):
                # The name stands in brackets and may contain spaces and brackets itself.
                state, *fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                if state != b"Z":
                    found[pid] = int(fields[18]) / _TICKS
                    pending.append(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _read(file: str) -> bytes:
    with open(file, "rb", buffering=0) as stream:
        return stream.read()


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
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
        known, victims = victims, [pid for pid in victims if is_alive(pid)]
        victims += [pid for parent in known for pid in descendants(parent)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def reap() -> None:
    """Collect ended children that nobody waits for; needed once orphans are adopted."""
    for child in _children(os.getpid()):
        if not is_alive(child):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
