"""G2: a process that is killed at any system call of a restart and a save leaves what the next one goes on from, bitwise.

`make chaos` kills at every one of them; here it is at some.
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

import pytest
from support.chaos import ASKED, report
from support.saves import KINDS, litter, load, make_manager, train_on

from danling.cli.verify import verify

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


def struck(
    function: Callable[..., Any], *args: Any, inject: str | None, seconds: float = 60.0
) -> Ended:
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
    command = [
        "strace",
        "-f",
        "-o",
        str(log),
        "-p",
        str(pid),
        "-e",
        f"trace={','.join(f'?{name}' for name in DISK)}",
    ]
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
    return [
        f"{name}:when={k}" for name in DISK if name in set(names) for k in range(1, most[name] + 1)
    ]


FIRST, KILLED, LAST = 3, 4, 6
SOME = 8
QUICK = {("file", "disabled"), ("dcp", "async")}


@pytest.mark.skipif(
    not has_strace(),
    reason="strace is not installed, or may not trace: tests of faults use patched calls",
)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=[] if (kind, mode) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for mode in ("disabled", "async")
    ],
)
def test_killed_at_a_system_call(kind: str, mode: str, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    train_on(kind, earlier, FIRST)
    # Everything is imported by then, and the whole run is what it is compared with.
    assert (
        train_on(kind, Path(shutil.copytree(earlier, tmp_path / "whole")), LAST, mode=mode) == FIRST
    )
    alone = Path(shutil.copytree(earlier, tmp_path / "alone"))
    left_alone = struck(_train_to_the_kill, kind, alone, mode, inject=None)
    assert left_alone.error == "" and left_alone.signal == 0
    calls = strikes(left_alone.calls)
    assert len(calls) > 200
    chosen = calls if ASKED else calls[:: -(-len(calls) // SOME)]
    kills = 0
    for when in chosen:
        place = Path(shutil.copytree(earlier, tmp_path / "killed"))
        ended = struck(_train_to_the_kill, kind, place, mode, inject=f"{when}:signal=KILL")
        kills += ended.signal == 9
        begun = train_on(kind, place, LAST, mode=mode)
        assert begun >= FIRST, when
        manager = make_manager(kind, place)
        found = {
            record.name: load(manager, record.name)
            for record in manager.store.records(complete=True)
        }
        newest = {
            "latest": LAST,
            "best": LAST,
            f"ckpt-s{LAST:012d}": LAST,
            f"ckpt-s{LAST - 1:012d}": LAST - 1,
        }
        assert newest.items() <= found.items(), when
        # Beside what retention keeps there is the one that was resumed, under whatever name it was found.
        assert set(found.values()) == {LAST, LAST - 1, begun}, when
        assert litter(place) == [], when
        assert not [verdict for verdict in verify(place, "full") if verdict["problems"]], when
        shutil.rmtree(place)
    # In the background the calls come in another order each time, and the last ones of a count may not come.
    assert kills > 0.75 * len(chosen)
    report(f"at system calls of a restart and a save: {kind}, {mode}", kills, len(chosen))


def _train_to_the_kill(kind: str, place: Path, mode: str) -> None:
    train_on(kind, place, KILLED, mode=mode)
