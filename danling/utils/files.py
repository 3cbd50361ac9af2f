"""Small files: which names may become paths, reading with bounds, atomic writing, and obstacles."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger("danling")

_LONGEST_NAME = 4096
_LONGEST_PART = 255
_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of `os.open` for a file that is made, never found: neither a link, nor a pipe, nor the contents of another file."""
TEXT_LIMIT = 64 << 20
"""Bytes of the largest text that is read. A sparse file of some gigabytes takes no room on a disk."""


def write_atomically(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace a small file atomically: a reader sees the old contents or the new ones. The directory entry is not synced to disk.

    Args:
        path: The file.
        data: Its new contents.
        durable: Whether the contents are on disk when this returns. Without it, a machine that fails may leave an empty file.
    """
    raw = data.encode() if isinstance(data, str) else data
    try:
        with replacing(path, durable=durable) as file:
            file.write(raw)
    except OSError as error:
        raise write_error(f"{len(raw):,} bytes", path, error) from error


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the one at `path` when the context ends without an error; it is then on disk, if it is `durable`.

    The staged file has a random name and is made here: what a stranger has put in the directory, a link or a pipe, is never opened.
    """
    staged = staged_path(path)
    # 0666 less the umask, as any other file: not the 0600 of `tempfile`, and not more than the user allows.
    handle = os.open(staged, NEW_FILE, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def staged_path(path: Path) -> Path:
    """Return a free name for the unfinished contents of a file, in its directory."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: str | os.PathLike[str], *, limit: int = TEXT_LIMIT) -> str:
    """Return a text file in UTF-8. Every file of text that another process or person may have written is read by this function."""
    return read_bytes(path, limit=limit).decode("utf-8")


def read_bytes(
    path: str | os.PathLike[str], *, limit: int, follow: bool = True, directory: int | None = None
) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes; see `open_file`.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
        ValueError: If it is larger.
    """
    with open_file(path, follow=follow, directory=directory) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(
            f"Expected a file of at most {limit:,} bytes. Received: {str(path)!r}, which is larger."
        )
    return content


def open_file(
    path: str | os.PathLike[str], *, follow: bool = True, directory: int | None = None
) -> BinaryIO:
    """Open a regular file for reading, in binary mode. Opening a named pipe would block until a writer appears.

    Args:
        path: Its path; relative to `directory` if that is given.
        follow: Whether a link is followed. Without it, one is an `OSError`.
        directory: Descriptor of an open directory.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=directory)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def refuse_link(path: Path) -> None:
    """Refuse a link in a place where this library writes and removes files: what it leads to belongs to the user."""
    if os.path.islink(path):
        raise ValueError(
            f"Expected no link at {path}, where files are written and removed. Received: a link to {os.readlink(path)}. Move what it leads "
            "to here; a run directory, its `checkpoints` and the directory of a store may be links."
        )


def write_all(handle: int, data: bytes) -> None:
    """Write bytes at the place of a descriptor. A nearly full disk takes a part of them, and fails at the next call only."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def write_error(
    what: str, path: Path, error: OSError, *, room: str = "Free space there"
) -> OSError:
    """Return an error of a write that says what to do."""
    code = error.errno or errno.EIO
    fix = room if code in _FULL else "Make it writable for this process"
    return OSError(
        code,
        f"Expected to write {what} to {path}. Received: {os.strerror(code)}. {fix}, and start it again.",
    )


def clear_places(*, files: Iterable[Path] = (), directories: Iterable[Path] = ()) -> None:
    """Rename anything that blocks a path where a file or a directory is needed, and log its new path.

    A link counts as what it leads to; a dangling link is renamed itself.
    """
    # By `os.path`: before Python 3.14, those of `Path` raise where a link leads to what may not be
    # looked at, instead of saying that it does not fit.
    blocked = [path for path in files if os.path.lexists(path) and not os.path.isfile(path)]
    blocked += [path for path in directories if os.path.lexists(path) and not os.path.isdir(path)]
    for path in blocked:
        aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
        os.replace(path, aside)
        logger.warning(
            "%s was in the way of this run and is no part of it. It was moved to %s.", path, aside
        )


def is_text(path: str | os.PathLike[str]) -> bool:
    """Whether a path is text in UTF-8; Linux takes any bytes."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_path(name: object) -> str:
    """Return a name that is a plain relative path: parts with a slash between them, none of which leads upwards.

    Every reader that opens, writes, renames or removes a file by a name from a file calls this or `plain_name` first.
    """
    if not isinstance(name, str) or not is_plain_path(name):
        shown = repr(name[:80] if isinstance(name, str) else type(name).__name__)
        raise ValueError(f"{shown} is no plain relative name of a file")
    return name


def plain_name(name: object) -> str:
    """Return a name that is a plain relative path of one part: a file in the directory itself."""
    plain = plain_path(name)
    if "/" in plain:
        raise ValueError(f"{plain[:80]!r} is no plain name of a file in the directory itself")
    return plain


def is_plain_path(name: str) -> bool:
    """Whether `plain_path` takes a name."""
    # Another system may read the directory, where such a name leads elsewhere.
    if "\\" in name or _CONTROL.search(name) or _DRIVE.match(name):
        return False
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    return size <= _LONGEST_NAME and all(
        part not in ("", ".", "..") and len(os.fsencode(part)) <= _LONGEST_PART for part in parts
    )
