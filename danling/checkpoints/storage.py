"""Files that survive a crash at any instant: every write of a checkpoint goes through this module.

Every call goes through `os`, so that a test can let each of them fail once. What fails is raised as a `CheckpointDiskError`,
which names the operation and the path.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from danling.utils.files import NEW_FILE

from .errors import CheckpointDamaged, CheckpointDiskError, CheckpointError, disk_error, reason

logger = logging.getLogger("danling")

STAGED = ".staged-"
"""Prefix of unfinished files and directories; readers never look at such a name."""
UPLOADING = ".uploading-"
"""Prefix of second names of files that are being copied to an object store."""

_CHUNK = 4 << 20
_TEXT_CHUNK = 64 << 10
_TEXT_LIMIT = 64 << 20
# Operations that need no space, so that errors of them do not give how much there is.
_LOOKS = ("read", "list", "look at")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What file systems without hard links answer, or with too many of one file.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


@contextmanager
def _trying(operation: str, path: Path) -> Iterator[None]:
    """Let errors of the operating system name what was tried, and the path."""
    try:
        yield
    except CheckpointDiskError:
        raise
    except OSError as error:
        free = None if operation in _LOOKS else free_bytes(path)
        raise disk_error(operation, path, error, free=free) from error


def free_bytes(path: Path) -> int | None:
    """Return the free bytes of the file system of a path; `None` when even that cannot be known."""
    # The file was to be made, and maybe its directory too.
    for directory in (path, *path.parents):
        try:
            found = os.statvfs(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize
    return None


class HashingWriter:
    """A binary stream into a file descriptor that is hashed as it is written: no second pass over the data."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self._path = path
        self.error: CheckpointDiskError | None = None
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
            try:
                with _trying("write", self._path):
                    while piece:
                        piece = piece[os.write(self._handle, piece) :]
            except CheckpointDiskError as error:
                self.error = self.error or error
                raise

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def fileno(self) -> int:
        """Return the descriptor, with everything handed to the system, so that it can be synced."""
        self.flush()
        return self._handle

    def close(self) -> None:
        """Hand what was gathered to the system; the descriptor stays open."""
        self.flush()

    @property
    def sha256(self) -> str:
        """Digest of what was written so far, in hexadecimal."""
        self.flush()
        return self._hash.hexdigest()


@contextmanager
def open_new(path: Path) -> Iterator[HashingWriter]:
    """Open a new file for writing. When the context ends the contents are durable; if it fails, the file is removed."""
    with _trying("create", path):
        # What is there under its name, such as a hard link of another file, is never opened.
        with suppress(FileNotFoundError):
            os.unlink(path)
        handle = os.open(path, NEW_FILE, 0o666)
    writer = HashingWriter(handle, path)
    try:
        yield writer
        writer.flush()
        with _trying("sync", path):
            os.fsync(handle)
    # Whatever ends it, a signal included: half a file must not stay under a name.
    except BaseException as error:
        with suppress(OSError):
            os.close(handle)
        discard(path)
        if writer.error is not None and writer.error is not error:
            # torch.save hides the error of the operating system behind one about offsets in its archive; raise the real one.
            raise writer.error from None
        raise
    # NFS reports a full disk at the close.
    with _trying("close", path):
        os.close(handle)


def write_file(path: Path, write: Callable[[HashingWriter], object]) -> tuple[int, str]:
    """Write a new file; see `open_new`."""
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
    """Replace a small text file atomically and durably, its directory entry included."""
    replace_text(path, text)
    sync_directory(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a small text file atomically. The content is fsynced; the directory entry is not, see `sync_directory`."""
    staged = staged_name(path.parent)
    write_new_text(staged, text)
    try:
        replace(staged, path)
    except BaseException:
        discard(staged)
        raise


def link(source: Path, path: Path) -> None:
    """Give a finished file another name atomically, replacing what was there: by a hard link, or a copy where there are none."""
    staged = staged_name(path.parent)
    try:
        with _trying("write", path):
            # To a name of its own first: `os.link` does not replace, and a rename does.
            try:
                os.link(source, staged)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with open_new(staged) as writer:
                    for chunk in chunks(source):
                        writer.write(chunk)
        replace(staged, path)
    except BaseException:
        discard(staged)
        raise


def replace(source: Path, target: Path) -> None:
    """Rename a file, in place of what was there."""
    with _trying("rename a file to", target):
        os.replace(source, target)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    with _trying("sync", directory):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it where they are missing, durably."""
    if not os.path.isdir(directory):
        make_directory(directory.parent)
        with _trying("make the directory", directory):
            try:
                os.mkdir(directory)
            except FileExistsError:
                # Another rank was faster, or a file is in the way.
                refuse_no_directory(directory)
                return
        sync_directory(directory.parent)


def refuse_no_directory(directory: Path) -> None:
    """Refuse something other than a directory in the place of one, such as a link to a file system that is not mounted."""
    if os.path.lexists(directory) and not os.path.isdir(directory):
        found = f"a path that {absence(directory)}"
        raise CheckpointDiskError(
            f"Expected a directory at {directory}. Received: {found}. Bring back what it leads to, or move it away."
        )


def names(directory: Path) -> set[str]:
    """Return the names in a directory; none when it does not exist."""
    with _trying("list", directory):
        try:
            return set(os.listdir(directory))
        except FileNotFoundError:
            return set()


def size_of(path: Path) -> int | None:
    """Return the size of a regular file in bytes; `None` when there is none, see `absence` for the reason."""
    with _trying("look at", path):
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return None
            raise
    return found.st_size if stat.S_ISREG(found.st_mode) else None


MISSING = "is missing"
"""What `absence` says when nothing is there at all."""
IS_FILE = "is a file"

_KINDS = {stat.S_IFREG: IS_FILE, stat.S_IFDIR: "is a directory", stat.S_IFIFO: "is a named pipe"}


def absence(path: Path) -> str:
    """Say in a few words why a path is no regular file: `is missing`, `is a directory`, ..."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a link that leads nowhere" if os.path.islink(path) else MISSING
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    return _KINDS.get(stat.S_IFMT(mode), "is a device or a socket")


def is_no_file(path: Path) -> bool:
    """Whether there is something else than a regular file at a path, which links lead to: a directory, a named pipe, ..."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def make_way(path: Path) -> None:
    """Rename what blocks the path of a file that is to be written: a directory, a link or a named pipe."""
    try:
        is_free = stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        is_free = True  # nothing is there, or a file that cannot be examined, and that can still be replaced
    if not is_free:
        set_aside(path)


def set_aside(path: Path) -> None:
    """Rename the file or directory at a path to a unique name `<name>.aside-<random>`, and log it."""
    aside = path.parent / f"{path.name}.aside-{uuid.uuid4().hex[:8]}"
    replace(path, aside)
    logger.warning(
        "%s was in the way of a checkpoint and is no part of one. It was moved to %s.", path, aside
    )


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Opening a named pipe would block until a writer appears."""
    with _trying("read", path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Of the open file: its path may lead to another one by now.
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    raise CheckpointDiskError(
        f"Expected a file at {path}. Received: a path that {absence(path)}. Move it away."
    )


def chunks(path: Path, size: int = _CHUNK) -> Iterator[memoryview]:
    """Yield the contents of a regular file; each piece is gone when the next one comes."""
    # One buffer for all pieces: fresh memory for each would cost more than the read.
    buffer = memoryview(bytearray(size))
    handle = open_regular(path)
    with _trying("read", path):
        try:
            while count := os.readv(handle, [buffer]):
                yield buffer[:count]
        finally:
            os.close(handle)


def read_text(path: Path, *, limit: int | None = _TEXT_LIMIT) -> str:
    """Return the contents of a small text file; bytes that are not UTF-8 are decoded as U+FFFD."""
    content = bytearray()
    for chunk in chunks(path, _TEXT_CHUNK):
        content += chunk
        if limit is not None and len(content) > limit:
            raise CheckpointDamaged(f"{path.name} has more than {limit:,} bytes")
    return content.decode("utf-8", errors="replace")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


# Copies on other machines are told apart by samples: hashing a large model whole delays the start.
_BLOCK = 64 << 10
_BLOCKS = 64


def sampled_digest(path: Path) -> str:
    """Return a SHA-256 over the size of a file and evenly spaced blocks of it, or over those of all files below a directory."""
    digest = hashlib.sha256()
    files = (
        [path] if path.is_file() else sorted(each for each in path.rglob("[!.]*") if each.is_file())
    )
    blocks = max(_BLOCKS // max(len(files), 1), 2)
    for file in files:
        handle = open_regular(file)
        with _trying("read", file):
            try:
                size = os.fstat(handle).st_size
                digest.update(f"{size}\n".encode())
                # From the first block to the last one; of a small file several are the same.
                last = max(size - _BLOCK, 0)
                for offset in sorted({last * index // (blocks - 1) for index in range(blocks)}):
                    digest.update(os.pread(handle, _BLOCK, offset))
            finally:
                os.close(handle)
    return digest.hexdigest()


def write_mark(path: Path, *, within: int) -> None:
    """Make an empty file durably in an open directory; one that is there is replaced."""
    remove(path, within=within)
    with _trying("create", path):
        handle = os.open(path.name, NEW_FILE, 0o666, dir_fd=within)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: Path, *, within: int | None = None) -> None:
    """Remove a file that may be gone already; of a directory that is open, if its descriptor is given, whatever its path leads to now."""
    with _trying("remove", path), suppress(FileNotFoundError):
        name = path if within is None else path.name
        os.unlink(name, dir_fd=within)


def remove_tree(directory: Path, *, within: int | None = None) -> None:
    """Remove a directory of files, and directories below it. Links in it are removed, and what they lead to is not.

    Every directory is opened once, and what is removed is named relative to it: an exchange of a directory for a link leads nowhere.
    """
    if within is None and os.path.islink(directory):
        raise CheckpointDiskError(
            f"Expected a directory to remove. Received: {directory}, a link, whose contents stay."
        )
    name = directory if within is None else directory.name
    with _trying("remove", directory):
        handle = os.open(name, _DIRECTORY, dir_fd=within)
        try:
            with os.scandir(handle) as entries:
                found = sorted(
                    (entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries
                )
            for entry, is_directory in found:
                if is_directory:
                    remove_tree(directory / entry, within=handle)
                else:
                    remove(directory / entry, within=handle)
        finally:
            os.close(handle)
        os.rmdir(name, dir_fd=within)


def _remove_any(path: Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(path)
    else:
        remove(path)


class Pinned:
    """A directory that stays open, so that it can be told from another one that takes its path.

    Numbers of devices and inodes alone do not tell: a file system gives that of a removed directory to the next one, and one that the
    network or another process serves (FUSE) may give a directory another number once nothing has it open.
    """

    def __init__(self, directory: Path) -> None:
        with _trying("open", directory):
            self._handle = os.open(directory, _DIRECTORY & ~os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._handle)

    def is_open_as(self, handle: int) -> bool:
        """Whether a descriptor leads to this directory."""
        return os.path.samestat(os.fstat(self._handle), os.fstat(handle))


@contextmanager
def opened(directory: Path, expected: Pinned | None, *, within: int | None = None) -> Iterator[int]:
    """Open a directory in which a run saves, to remove files in it; refuse another one than it was.

    Args:
        directory: Its path. The last part of it may be a link unless `within` is given.
        expected: The directory that it was; `None` takes any.
        within: Descriptor of the directory above it.
    """
    flags = _DIRECTORY if within is not None else _DIRECTORY & ~os.O_NOFOLLOW
    with _trying("open", directory):
        name = directory if within is None else directory.name
        handle = os.open(name, flags, dir_fd=within)
    try:
        with _trying("look at", directory):
            is_other = expected is not None and not expected.is_open_as(handle)
        if is_other:
            raise CheckpointDiskError(
                f"Expected {directory} to be the directory in which this run began to save. Received: another one, in which nothing is "
                "removed. Bring the former one back."
            )
        yield handle
    finally:
        os.close(handle)


def discard(path: Path) -> None:
    """Remove an unfinished file or directory; if that fails too, the next save into this directory removes it."""
    with suppress(OSError):
        _remove_any(path)


def require_space(directory: Path, needed: int) -> None:
    """Refuse a save that the file system has no room for, before anything is written."""
    with _trying("look at", directory):
        found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    # Headers, names and plain values come to the tensors, which are what `needed` counts.
    wanted = needed + needed // 20
    if free < wanted:
        raise CheckpointError(
            f"Expected {wanted:,} free bytes in {directory} for a checkpoint. Received: {free:,}. Free some, or set "
            "checkpoint.keep_latest_k. What was saved before is still there."
        )


def clean(directory: Path, prefix: str = STAGED) -> None:
    """Remove the files that a killed save has left. A file that cannot be removed is harmless: the next save tries again."""
    for name in names(directory):
        if name.startswith(prefix):
            discard(directory / name)
