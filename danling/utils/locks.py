"""Locks on files, which the death of their holder releases.

`FileLock` belongs to a process for as long as it lives, and says which process that is. `exclusive` and `shared` protect a few writes or
reads, between threads of one process too.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .files import refuse_link, write_error

logger = logging.getLogger("danling")

_TAKEN = {errno.EACCES, errno.EAGAIN}
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""What a file system without locks answers."""
WRITING = ".writing-"
"""Prefix of files in a directory of checkpoints, each locked by a process that writes there in the background."""

_NOT_TO_OPEN = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}
_PAUSE_SECONDS = (0.0001, 0.001)
"""The first and the longest pause between two attempts of a reader. Where several producers append, the lock is free for moments only."""
_POLL_SECONDS = 0.1
_MOMENT_SECONDS = 0.3
_MOST_REMOVALS = 100
"""How often the directory of a lock may go while its file is made, before that is taken for a fault of the path."""

# By path: a second lock of this process on one file would be granted, and closing it would give up the first.
_held_here: dict[Path, tuple[int, Callable[[], FileLock | None]]] = {}
_NONE: tuple[int, Callable[[], None]] = (0, lambda: None)
_warned_of: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host: Name of its machine; empty when it is not known.
        pid: Its process; 0 when it is not known.
        since: When it took the lock, in UTC.
    """

    host: str = ""
    pid: int = 0
    since: str = ""

    @classmethod
    def me(cls) -> Holder:
        """Return what describes this process."""
        return cls(
            socket.gethostname(), os.getpid(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        )

    @classmethod
    def parse(cls, text: bytes) -> Holder:
        """Read what a holder has written of itself; one that has not yet, or is of another kind, is unknown."""
        try:
            found = json.loads(text)
            return cls(str(found["host"]), int(found["pid"]), str(found["since"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls()

    def text(self) -> str:
        """Return what `parse` reads."""
        return json.dumps({"host": self.host, "pid": self.pid, "since": self.since}) + "\n"

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host} since {self.since}"
            if self.pid
            else "another process"
        )


class FileLock:
    """An exclusive lock on a file. One process has it at a time, until it ends.

    It is a record lock of the kernel (`fcntl.lockf`): a killed holder gives it back, and children do not inherit it, so that a loader
    worker that outlives the holder does not keep it (one of `flock` it would). A record lock falls when *any* descriptor of the file
    is closed in the process: nothing else may open it, and a second lock of this process on the same file is refused before it does.
    The file says who holds it, and is removed when the lock is given back.

    Where the file system knows no locks, that is warned about once and the lock counts as taken; `works` then says no.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.works = True
        self.holder = Holder()
        """Who had it at the last attempt that failed."""
        self.was_removed = False
        """Whether its file was removed while this process had it."""
        self._handle: int | None = None
        self._finalizer: weakref.finalize[[int, Path, int], FileLock] | None = None

    @property
    def held(self) -> bool:
        """Whether this process has it."""
        return self._finalizer is not None and self._finalizer.alive

    def acquire(self) -> bool:
        """Take it if it is free, without waiting, and return whether this process has it now."""
        if self.held:
            return True
        path = self.file.parent.resolve() / self.file.name
        refuse_link(path)
        if _is_held_here(path):
            self.holder = Holder.me()
            return False
        try:
            return self._take(path)
        except OSError as error:
            self.release()
            raise write_error("the lock of this process", path, error) from error

    def _take(self, path: Path) -> bool:
        while True:
            handle = _made(path, self.file.parent)
            if not self._lock(handle):
                return False
            if _is_same_file(handle, path):
                break
            # Its holder has removed the file since it was opened: no other process would find it.
            os.close(handle)
        self._handle = handle
        self._finalizer = weakref.finalize(self, _give_back, handle, path, os.getpid())
        _held_here[path] = (os.getpid(), weakref.ref(self))
        os.ftruncate(handle, 0)
        os.pwrite(handle, Holder.me().text().encode(), 0)
        return True

    def take_over(self) -> bool:
        """Take it from another lock of this process, which does not have it any more, and return whether this one has it now."""
        _, other = _held_here.get(self.file.parent.resolve() / self.file.name, _NONE)
        held = other()
        if held is not None:
            held.release()
        return self.acquire()

    def is_taken(self) -> bool:
        """Whether another holds it, asked without taking it: nothing is made, changed or removed."""
        if self.held:
            return False
        path = self.file.parent.resolve() / self.file.name
        if _is_held_here(path):
            return True
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _TAKEN
        finally:
            os.close(handle)
        return False

    def _lock(self, handle: int) -> bool:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                self.holder = Holder.parse(os.pread(handle, 4096, 0))
                os.close(handle)
                return False
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
            self.works = False
            device = os.stat(self.file.parent).st_dev
            if device not in _warned_of:
                _warned_of.add(device)
                logger.warning(
                    "The file system of %s has no locks (%s): nothing keeps a second process from writing into the directory of a run. See "
                    "to it that one does.",
                    self.file.parent,
                    error.strerror,
                )
        return True

    def wait(self, seconds: float) -> bool:
        """Take it as soon as it is free, at the latest after `seconds`; return whether this process has it now.

        A wait that is longer than a moment is told of, with the holder.
        """
        start = time.monotonic()
        told = False
        while not self.acquire():
            waited = time.monotonic() - start
            if waited >= seconds or (
                self.holder.pid == os.getpid() and self.holder.host == socket.gethostname()
            ):
                return False
            if not told and waited >= _MOMENT_SECONDS:
                told = True
                logger.warning(
                    "%s is in use by %s; waiting up to %.0f seconds for it to end.",
                    self.file.parent,
                    self.holder,
                    seconds,
                )
            time.sleep(_POLL_SECONDS)
        return True

    def confirm(self) -> bool:
        """Take it once more, and return whether this process has it still.

        A program that opens and closes the file, as by copying the directory, gives it up without knowing; if no other process has
        taken it meanwhile, it is this process's again. So it is if the file was removed, which `was_removed` then says: a process that took
        a new one may have ended.
        """
        # Without locks on the file system there is nothing to take again.
        if not self.held or self._handle is None or not self.works:
            return self.held
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            self.holder = Holder.parse(os.pread(self._handle, 4096, 0))
            return False
        # Asked by the path, without opening it: closing any descriptor of the file would give the lock up.
        if _is_same_file(self._handle, self.file.parent.resolve() / self.file.name):
            return True
        self.was_removed = True
        self.release()
        return self.acquire()

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = None


def _made(path: Path, directory: Path) -> int:
    """Open the file of a lock, which is made with its directory where they are missing. Another process may remove both meanwhile."""
    for _ in range(_MOST_REMOVALS):
        # Removed between the two calls, or within the first one.
        with suppress(FileNotFoundError, FileExistsError):
            directory.mkdir(parents=True, exist_ok=True)
            return _opened(path, os.O_RDWR | os.O_CREAT)
    # A fault of the path fails each time: here with its error.
    directory.mkdir(parents=True, exist_ok=True)
    return _opened(path, os.O_RDWR | os.O_CREAT)


def _opened(path: Path, flags: int) -> int:
    """Open the file of a lock: a regular one with no other name, since a holder writes into it, and a pipe would be waited for."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    kind = (
        f"a file with {found.st_nlink} names (hard links)"
        if stat.S_ISREG(found.st_mode)
        else "no regular file"
    )
    raise ValueError(
        f"Expected {path}, the file of a lock, to be a file with one name. Received: {kind}. Remove that name."
    )


def _is_held_here(path: Path) -> bool:
    for _ in range(2):
        pid, lock = _held_here.get(path, _NONE)
        found = lock()
        if pid != os.getpid() or found is None or not found.held:
            return False
        del found
        gc.collect()  # its owner may be gone, and only not collected yet
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _give_back(handle: int, path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, which never had it
    _held_here.pop(path, None)
    # Removed while it is still locked: the next one that opens the path makes a new file.
    try:
        if _is_same_file(handle, path):
            os.unlink(path)
    except OSError:
        logger.debug("%s could not be removed.", path, exc_info=True)
    os.close(handle)


# Locks for a moment


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock against every other thread and process that asks for it; the death of its holder gives it back.

    The lock is one of the open file (`flock`), so that two objects of one process exclude each other too. Its file stays.
    """
    handle = _opened(path, os.O_RDWR | os.O_CREAT)
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
    """Hold a lock together with other readers, against those that ask for it by `exclusive`.

    Where its file can neither be opened nor made, and on a file system without locks, nothing writes there: no lock is taken.
    """
    handle = None
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
        try:
            handle = _opened(path, flags)
            break
        except OSError as error:
            if error.errno not in _NOT_TO_OPEN:
                raise
    if handle is None:
        yield
        return
    try:
        _share(handle, path, seconds)
        yield
    finally:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _share(handle: int, path: Path, seconds: float) -> None:
    pause, longest = _PAUSE_SECONDS
    end = time.monotonic() + seconds
    # Asked again and again, since a `flock` that waits has no time limit.
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Expected to read {path} within {seconds:g} seconds. Received: it is locked by a process that "
                    "writes. Check whether a producer hangs or was suspended, and continue or end it."
                ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return
        time.sleep(pause)
        pause = min(2 * pause, longest)
