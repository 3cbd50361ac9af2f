"""Processes that hold a lock until they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from danling.utils.locks import FileLock


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """Run `body` in a forked process, which ends by a kill."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def hold(file: Path, marker: Path) -> None:
    lock = FileLock(file)
    assert lock.acquire()
    marker.touch()
    time.sleep(60)
