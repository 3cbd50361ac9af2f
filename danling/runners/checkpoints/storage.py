"""Files that survive a crash at any instant."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from .errors import CheckpointError

STAGED = ".staged-"
"""Prefix of what is not finished; never a name that a reader looks at."""


class HashingFile:
    """A binary file that is hashed as it is written.

    Args:
        file: An open binary file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write and hash bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    @property
    def sha256(self) -> str:
        """Digest of what was written so far, in hexadecimal."""
        return self._hash.hexdigest()


def stage(directory: Path, write: Callable[[HashingFile], None]) -> tuple[Path, int, str]:
    """Write a file under a name that nobody reads, durably.

    Args:
        directory: Where its final name will lie: a rename cannot cross file systems.
        write: Writes its contents.

    Returns:
        Its path, its size in bytes and its SHA-256.
    """
    path = directory / f"{STAGED}{uuid.uuid4().hex}"
    try:
        with path.open("xb", buffering=1 << 20) as file:
            hashing = HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        return path, hashing.size, hashing.sha256
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Put a small text file in place, durably and at once."""
    staged, _, _ = stage(path.parent, lambda file: file.write(text.encode()) and None)
    os.replace(staged, path)
    sync_directory(path.parent)


def publish(staged: Path, path: Path) -> None:
    """Make a staged file appear under a name, in place of what was there; the staged name stays.

    A hard link where the file system has them, else a copy.
    """
    link = path.parent / f"{STAGED}{uuid.uuid4().hex}"
    try:
        try:
            os.link(staged, link)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS):
                raise
            _copy(staged, link)
        os.replace(link, path)
    except BaseException:
        link.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(1 << 22):
            digest.update(chunk)
        return digest.hexdigest()


def require_space(directory: Path, needed: int) -> None:
    """Refuse a save that the file system has no room for, before anything is written.

    Raises:
        CheckpointError: If fewer than `needed` bytes, and a tenth more, are free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed * 1.1:
        raise CheckpointError(
            f"Expected {int(needed * 1.1):,} free bytes in {directory} for a checkpoint. Received: {free:,}. Free some, or set "
            "checkpoint.keep_latest_k."
        )


def clean(directory: Path) -> None:
    """Remove what a save that was killed has left."""
    for path in directory.glob(f"{STAGED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
