"""A function in a fork of the test's own process: it starts in a millisecond, and SIGKILL meets exactly it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from danling.utils.locks import FileLock

from .process_tree import die_with_parent


def fork(function: Callable[..., Any], *args: Any) -> int:
    """Call a function in a fork, which ends with 0 when it returns and with 1, after a traceback, when it raises; return the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        function(*args)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """Wait for the end of a fork and return its exit code; a negative one is a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> int:
    """Send SIGKILL to a fork and return its exit code, which is another one where it had ended by itself."""
    os.kill(pid, signal.SIGKILL)
    return wait(pid)


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """Run `body` in a fork, which ends by a kill."""
    pid = fork(body)
    try:
        yield pid
    finally:
        kill(pid)


def hold(file: Path, marker: Path) -> None:
    """Take a lock, and keep it until the process is killed."""
    lock = FileLock(file)
    assert lock.acquire()
    marker.touch()
    time.sleep(60)
