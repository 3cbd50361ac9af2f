"""Locks and writes that the stores and channels in files share."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock against every other thread and process that asks for it; the death of its holder gives it back.

    The lock is one of the open file (`flock`), so that two objects of one process exclude each other too. Its file stays.

    Args:
        path: The file; its directory exists.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Said aloud: a child that another thread has forked meanwhile shares the open file, and closing would leave it the lock.
        fcntl.flock(handle, fcntl.LOCK_UN)
        with suppress(OSError):  # the descriptor is gone even then, and nothing was written to it
            os.close(handle)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write bytes at the place of a descriptor, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def write_error(what: str, path: Path, error: OSError) -> OSError:
    """Return an error of a write that says what to do.

    Args:
        what: What was written, for the message.
        path: Where.
        error: What the system said.
    """
    code = error.errno or errno.EIO
    mend = (
        "Free space there, or let the producer be ahead by fewer samples"
        if code in _FULL
        else "See to it that this process can write there"
    )
    return OSError(
        code, f"Expected to write {what} to {path}. Received: {os.strerror(code)}. {mend}, and start it again."
    )
