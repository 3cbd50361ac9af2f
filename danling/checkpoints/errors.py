"""What can be wrong with a checkpoint, and with its disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from danling.utils.secrets import hide_in_text


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""

    def __str__(self) -> str:
        # A place may be a URL with a key.
        return hide_in_text(super().__str__())


class CheckpointDiskError(CheckpointError, OSError):
    """The file system did not do what it was asked for."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamaged(CheckpointError):
    """A file is not what was written."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but not one of this run, model or configuration."""


@contextmanager
def restoring(what: str, entry: str, *, own: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Restore a part of a checkpoint inside: whatever a wrong value makes fail is the error of a checkpoint.

    Args:
        what: The part, for the error.
        entry: What to add to `checkpoint.exclude_from_loading` to leave the part out.
        own: Errors that say enough by themselves.
    """
    passed: tuple[type[Exception], ...] = (CheckpointError, *own)
    try:
        yield
    # First, since these are kinds of RuntimeError and ValueError too.
    except passed:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointMismatch(
            f"Expected a checkpoint whose {what} this run can restore. Received: {type(error).__name__}: {error}. Use another checkpoint, "
            f"or leave that part out: add {entry!r} to checkpoint.exclude_from_loading."
        ) from error


_GONE = "Bring it back (is the file system mounted?)"
_DENIED = "Give this user the right to do that, or name another directory in checkpoint_dir"
_FULL = "Free some space, or let checkpoint.keep_latest_k keep fewer checkpoints"
# By the error number: what the user can do about it. Any other number is a fault of the disk.
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _DENIED),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ENXIO), _GONE),
    errno.EROFS: "The file system is mounted for reading only, often after an error of the disk (see `dmesg`): mount it for writing",
    errno.ELOOP: "Remove the links that lead to each other",
}
_FAILING = "The disk, or the server that it is on, may be failing (see `dmesg`): repair it"


def reason(error: OSError) -> str:
    """Return what the operating system said, in its words."""
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__


def disk_error(
    operation: str, path: Path, error: OSError, *, free: int | None = None
) -> CheckpointDiskError:
    """Return the error to raise for one of the operating system."""
    space = "" if free is None else f", with {free:,} bytes free"
    fix = _FIXES.get(error.errno or 0, _FAILING)
    # One argument, so that `str` gives the message: `OSError` with a number prints its own text.
    found = CheckpointDiskError(
        f"Expected to {operation} {path}. Received: {reason(error)}{space}. {fix}, and start again: `auto_resume` continues from the "
        "newest checkpoint that verifies."
    )
    found.errno = error.errno
    return found
