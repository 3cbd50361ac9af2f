"""An `os` in which one call goes wrong: for a module that reaches the disk only through `os`.

monkeypatch.setattr(storage, "os", FaultyOs(fail_at=3, fault="enospc"))
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

_READS = ("read", "readv", "listdir", "stat", "lstat", "statvfs")
_PATHS = (
    "open",
    "link",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "listdir",
    "stat",
    "lstat",
    "statvfs",
)
_CHANGES = ("write", "fsync", "link", "replace", "unlink", "rmdir", "mkdir")
_CALLS = ("open", "write", "read", "readv", "fsync", "close", *_PATHS[1:])

_STRIKES: dict[str, tuple[str, ...]] = {
    "enospc": ("open", *_CHANGES),
    "eio": _CALLS,
    "eacces": _PATHS,
    "erofs": ("open", *_CHANGES),
    "half": ("write",),
    "crash": tuple(name for name in _CALLS if name not in _READS),
    "vanish": _CALLS,
}

FAULTS = tuple(_STRIKES)
"""Out of space, a broken disk, or no right to it, once; mounted for reading only from then on; half a write; the end of the process right
after the call; the whole directory gone from then on, until `mend`."""

_ERRORS = {"eio": errno.EIO, "eacces": errno.EACCES, "erofs": errno.EROFS}


class Crash(BaseException):
    """The process has died; nothing that unwinds reaches the disk any more."""


class FaultyOs:
    """Like `os`, but for one call."""

    def __init__(
        self, fail_at: int | None = None, fault: str = "eio", directory: Path | None = None
    ) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fail_at = fail_at
        self._fault = fault
        self._directory = directory
        self.dead = False
        self._changing: list[bool] = []

    def candidates(self, fault: str) -> list[int]:
        """Return which of the calls so far make a difference when they go wrong in this way."""
        # A full disk lets one read, and a crash after a read is the crash before the next write.
        fitting = [index for index, (name, _) in enumerate(self.calls) if name in _STRIKES[fault]]
        return (
            [index for index in fitting if self._changing[index]]
            if fault in ("enospc", "erofs")
            else fitting
        )

    @property
    def struck(self) -> bool:
        return self._fail_at is not None and len(self.calls) > self._fail_at

    def mend(self) -> None:
        """Bring a directory back that has vanished; what was written in its place meanwhile is under it, as under a mount."""
        if self._fault == "vanish" and self.struck and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.rename(self._away, self._directory)

    @property
    def _away(self) -> Path:
        assert self._directory is not None
        return self._directory.with_name(f"{self._directory.name}-away")

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in _CALLS:
            return original

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Crash(name)
            self.calls.append((name, args[0]))
            self._changing.append(_changes(name, args))
            if len(self.calls) - 1 == self._fail_at:
                return self._strike(name, original, *args, **kwargs)
            if self.struck and self._fault == "erofs" and _changes(name, args):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return original(*args, **kwargs)

        return call

    def _strike(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fault == "vanish":
            os.rename(self._directory or "", self._away)
            return original(*args, **kwargs)
        if self._fault == "crash":
            original(*args, **kwargs)
            self.dead = True
            raise Crash(name)
        if self._fault == "half" and name == "write":
            original(args[0], args[1][: len(args[1]) // 2])
        if name == "close":
            # The descriptor is gone even when close reports an error.
            original(*args, **kwargs)
        code = _ERRORS.get(self._fault, errno.ENOSPC)
        raise OSError(code, os.strerror(code))


def _changes(name: str, args: tuple[Any, ...]) -> bool:
    return name in _CHANGES or (name == "open" and bool(args[1] & (os.O_WRONLY | os.O_RDWR)))
