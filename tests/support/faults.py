"""An `os` in which one call goes wrong: for a module that reaches the disk only through `os`.

monkeypatch.setattr(storage, "os", FaultyOs(fail_at=3, fault="enospc"))
"""

from __future__ import annotations

import errno
import os
from typing import Any

FAULTS = ("enospc", "eio", "half", "crash")
"""Out of space or a broken disk before the call, half a write, or the end of the process right after the call."""

_CALLS = (
    "open",
    "write",
    "read",
    "readv",
    "fsync",
    "close",
    "link",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "listdir",
    "stat",
    "statvfs",
)


_READS = ("read", "readv", "listdir", "stat", "statvfs")


class Crash(BaseException):
    """The process has died; nothing that unwinds reaches the disk any more."""


class FaultyOs:
    """Like `os`, but for one call.

    Attributes:
        calls: Names and first arguments of the calls so far.

    Args:
        fail_at: Number of the call that goes wrong, from 0; `None` only counts.
        fault: One of `FAULTS`.
    """

    def __init__(self, fail_at: int | None = None, fault: str = "eio") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fail_at = fail_at
        self._fault = fault
        self._dead = False

    def candidates(self, fault: str) -> list[int]:
        """Return which of the calls so far make a difference when they go wrong in this way."""
        if fault == "half":
            return [index for index, (name, _) in enumerate(self.calls) if name == "write"]
        # A full disk lets one read, and a crash after a read is the crash before the next write.
        return [index for index, (name, _) in enumerate(self.calls) if fault == "eio" or name not in _READS]

    @property
    def struck(self) -> bool:
        """Whether the fault has happened."""
        return self._fail_at is not None and len(self.calls) > self._fail_at

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in _CALLS:
            return original

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._dead:
                raise Crash(name)
            self.calls.append((name, args[0]))
            if len(self.calls) - 1 != self._fail_at:
                return original(*args, **kwargs)
            return self._strike(name, original, *args, **kwargs)

        return call

    def _strike(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fault == "crash":
            original(*args, **kwargs)
            self._dead = True
            raise Crash(name)
        if self._fault == "half" and name == "write":
            original(args[0], args[1][: len(args[1]) // 2])
        if name == "close":
            # The descriptor is gone even when close reports an error.
            original(*args, **kwargs)
        code = errno.EIO if self._fault == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code))
