"""Run a function in a forked process in which one system call is met by a signal or an error, through `strace --inject`.

calls = struck(go_on, place, inject=None).calls                     # what it does when it is left alone
for when in strikes(calls):                                         # `linkat:when=2`, ...
    ended = struck(go_on, copy_of(place), inject=f"{when}:signal=KILL")

The process is forked from the one of the test, so that everything is imported, and strace is attached before the function begins.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What reaches a file system. Between two of these nothing on disk changes, so that a kill at any other call is one at the next of them.
_NAMES = (
    "openat open creat read readv pread64 write writev pwrite64 fsync fdatasync sync_file_range close link linkat rename renameat "
    "renameat2 unlink unlinkat mkdir mkdirat rmdir newfstatat fstat stat lstat statx statfs fstatfs getdents64 ftruncate lseek "
    "fcntl flock fallocate copy_file_range symlink symlinkat chmod fchmod fchmodat utimensat"
)
DISK = tuple(_NAMES.split())
"""Names of system calls that reach a file system."""

_LINE = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)$")


@dataclass(frozen=True)
class Ended:
    """How the function ended.

    Attributes:
        signal: That ended the process, 0 when none did.
        error: What was raised, `""` when it returned.
        calls: `(thread, system call, rest of the line)`.
    """

    signal: int
    error: str
    calls: list[tuple[int, str, str]]


@cache
def has_strace() -> bool:
    """Whether strace is installed and may look into a process of ours."""
    if shutil.which("strace") is None:
        return False
    return bool(struck(_nothing, inject=None).calls)


def _nothing() -> None:
    Path(os.devnull).read_bytes()


def struck(function: Callable[..., Any], *args: Any, inject: str | None, seconds: float = 60.0) -> Ended:
    """Run a function in a forked process under strace."""
    with tempfile.TemporaryDirectory() as folder:
        told, log = Path(folder) / "error", Path(folder) / "log"
        pid = os.fork()
        if pid == 0:
            _run(function, args, told)
        os.waitpid(pid, os.WUNTRACED)
        status = _trace(pid, log, inject, seconds)
        error = told.read_text() if told.exists() else ""
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [match.groups() for match in map(_LINE.match, lines) if match]
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Ended(number, error, [(int(thread), name, rest) for thread, name, rest in found])


def _run(function: Callable[..., Any], args: Iterable[Any], told: Path) -> None:
    """In the child: wait to be looked at, run, and leave without any clean-up of the test's process."""
    with os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") as quiet:
        sys.stdout = sys.stderr = quiet
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            function(*args)
        except BaseException as error:
            told.write_text(f"{type(error).__name__}: {error}")
        os._exit(0)


def _trace(pid: int, log: Path, inject: str | None, seconds: float) -> int:
    """Let a stopped process go on under strace, and return how it ended, as `os.waitpid` does."""
    command = ["strace", "-f", "-o", str(log), "-p", str(pid), "-e", f"trace={','.join(f'?{name}' for name in DISK)}"]
    faults = [] if inject is None else ["-e", f"inject={inject}"]
    with subprocess.Popen([*command, *faults], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        attached = "attached" in tracer.stderr.readline()
        os.kill(pid, signal.SIGCONT if attached else signal.SIGKILL)
        late = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        late.start()
        _, status = os.waitpid(pid, 0)
        hung = not late.is_alive()
        late.cancel()
        tracer.communicate()
    assert not hung, f"{faults}: did not end in {seconds:g} s"
    return status


def strikes(calls: Iterable[tuple[int, str, str]], names: Iterable[str] = DISK) -> list[str]:
    """Return each call of some kinds once, as strace counts them: `name` and `when`, by thread."""
    counts: Counter[tuple[int, str]] = Counter((thread, name) for thread, name, _ in calls)
    most: Counter[str] = Counter()
    for (_, name), count in counts.items():
        most[name] = max(most[name], count)
    return [f"{name}:when={k}" for name in DISK if name in set(names) for k in range(1, most[name] + 1)]
