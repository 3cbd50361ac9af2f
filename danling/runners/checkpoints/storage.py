"""Files that survive a crash at any instant: the only place where checkpoints touch the disk.

Every call goes through `os`, so that a test can let each of them fail once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import CheckpointError

STAGED = ".staged-"
"""Prefix of what is not finished; never a name that a reader looks at."""

_CHUNK = 4 << 20
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


class HashingWriter:
    """A binary stream into a file descriptor that is hashed as it is written: no second pass over the data.

    Args:
        handle: A descriptor that is open for writing.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._hash = hashlib.sha256()
        self._small = bytearray()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write bytes; small pieces are gathered first."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        if len(view) < _CHUNK:
            self._small += view
            if len(self._small) >= _CHUNK:
                self.flush()
        else:
            self.flush()
            self._put(view)
        return len(view)

    def flush(self) -> None:
        """Hand what was gathered to the system."""
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(memoryview(small))

    def _put(self, view: memoryview) -> None:
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            # Hashed while it is in the processor's cache for the copy into the system's.
            self._hash.update(piece)
            while piece:
                piece = piece[os.write(self._handle, piece) :]

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def fileno(self) -> int:
        """Return the descriptor, with everything handed to the system: whoever asks for it wants to sync it."""
        self.flush()
        return self._handle

    def close(self) -> None:
        """Hand what was gathered to the system; whoever opened the descriptor closes it."""
        self.flush()

    @property
    def sha256(self) -> str:
        """Digest of what was written so far, in hexadecimal."""
        self.flush()
        return self._hash.hexdigest()


@contextmanager
def open_new(path: Path) -> Iterator[HashingWriter]:
    """Open a file under a name that no reader takes for finished; it is durable when the context ends, and gone when that fails.

    Args:
        path: The file.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        writer = HashingWriter(handle)
        yield writer
        writer.flush()
        os.fsync(handle)
    except BaseException:
        os.close(handle)
        discard(path)
        raise
    os.close(handle)


def write_file(path: Path, write: Callable[[HashingWriter], object]) -> tuple[int, str]:
    """Write a new file; see `open_new`.

    Args:
        path: The file.
        write: Writes its contents.

    Returns:
        Its size in bytes and its SHA-256.
    """
    with open_new(path) as writer:
        write(writer)
    return writer.size, writer.sha256


def write_new_text(path: Path, text: str) -> tuple[int, str]:
    """Write a small text file durably; see `write_file`."""
    return write_file(path, lambda writer: writer.write(text.encode()))


def staged_name(directory: Path) -> Path:
    """Return a free name for an unfinished file: in the directory of its final name, since a rename cannot cross file systems."""
    return directory / f"{STAGED}{uuid.uuid4().hex}"


def write_text(path: Path, text: str) -> None:
    """Put a small text file in place, durably and at one instant."""
    staged = staged_name(path.parent)
    write_new_text(staged, text)
    replace(staged, path)
    sync_directory(path.parent)


def link(source: Path, path: Path) -> None:
    """Make a finished file appear under another name, in place of what was there: a hard link where there are such, else a copy."""
    staged = staged_name(path.parent)
    try:
        try:
            os.link(source, staged)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy(source, staged)
        os.replace(staged, path)
    except BaseException:
        discard(staged)
        raise


def _copy(source: Path, target: Path) -> None:
    def pour(writer: HashingWriter) -> None:
        handle = os.open(source, os.O_RDONLY)
        try:
            while chunk := os.read(handle, _CHUNK):
                writer.write(chunk)
        finally:
            os.close(handle)

    write_file(target, pour)


def replace(source: Path, target: Path) -> None:
    """Rename a file, in place of what was there."""
    os.replace(source, target)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it where they are missing, durably."""
    if not os.path.isdir(directory):
        make_directory(directory.parent)
        try:
            os.mkdir(directory)
        except FileExistsError:
            return
        sync_directory(directory.parent)


def names(directory: Path) -> set[str]:
    """Return the names in a directory; none when it does not exist."""
    try:
        return set(os.listdir(directory))
    except FileNotFoundError:
        return set()


def size_of(path: Path) -> int | None:
    """Return the size of a regular file in bytes; `None` when there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_text(path: Path) -> str:
    """Return the contents of a small text file; bytes that are no text come back as marks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        content = b""
        while chunk := os.read(handle, _CHUNK):
            content += chunk
    finally:
        os.close(handle)
    return content.decode("utf-8", errors="replace")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    handle = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(handle, [buffer]):
            digest.update(buffer[:count])
    finally:
        os.close(handle)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def remove_tree(directory: Path) -> None:
    """Remove a directory of files, and directories below it."""
    for name in sorted(names(directory)):
        path = directory / name
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        else:
            remove(path)
    os.rmdir(directory)


def discard(path: Path) -> None:
    """Remove an unfinished file; when that fails as well, the next save of this directory does it."""
    try:
        remove(path)
    except OSError:
        return


def require_space(directory: Path, needed: int) -> None:
    """Refuse a save that the file system has no room for, before anything is written.

    Raises:
        CheckpointError: If fewer than `needed` bytes, and a twentieth more, are free.
    """
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    wanted = needed + needed // 20
    if free < wanted:
        raise CheckpointError(
            f"Expected {wanted:,} free bytes in {directory} for a checkpoint. Received: {free:,}. Free some, or set "
            "checkpoint.keep_latest_k. What was saved before is still there."
        )


def clean(directory: Path) -> None:
    """Remove what a save that was killed has left."""
    for name in names(directory):
        if name.startswith(STAGED):
            remove(directory / name)
