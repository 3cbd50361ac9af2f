"""Locks and writes that the stores and channels in files share.

A lock is held for a moment, by threads of one process against each other too, and beside other readers. That of `danling.utils.locks`
belongs to a process for as long as it lives, and says which one that is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from danling.utils.locks import NO_LOCKS

ROOM = "Free space there, or let the producer be ahead by fewer samples"
"""Advice on a full disk."""
_NOT_TO_OPEN = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}

_PAUSE_SECONDS = (0.0001, 0.001)
"""The first and the longest pause between two attempts of a reader. Where several producers append, the lock is free for moments only."""


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock against every other thread and process that asks for it; the death of its holder gives it back.

    The lock is one of the open file (`flock`), so that two objects of one process exclude each other too. Its file stays.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Closing alone would leave the lock to a child that another thread has forked meanwhile, which shares the open file.
        fcntl.flock(handle, fcntl.LOCK_UN)
        with suppress(OSError):  # the descriptor is gone even then, and nothing was written to it
            os.close(handle)


@contextmanager
def shared(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold a lock beside other readers, and keep those out who ask for it by `exclusive`.

    Where its file can neither be opened nor made, and on a file system without locks, nobody writes through this library: nothing is held.
    """
    handle = _open_to_share(path)
    try:
        if handle is not None:
            _share(handle, path, seconds)
        yield
    finally:
        if handle is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _open_to_share(path: Path) -> int | None:
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _NOT_TO_OPEN:
                raise
    return None


def _share(handle: int, path: Path, seconds: float) -> None:
    pause, longest = _PAUSE_SECONDS
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Expected to read beside {path} within {seconds:g} seconds. Received: it is locked by a process that "
                    "writes. See whether a producer hangs or was suspended, and let it go on or end it."
                ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return
        time.sleep(pause)
        pause = min(2 * pause, longest)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
