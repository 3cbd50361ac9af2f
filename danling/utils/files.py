"""Small files that are whole or not there, and what lies in their place."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger("danling")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a small file beside its place and move it there, so that a reader sees the old one or the new one.

    Args:
        path: Where it goes; its directory exists.
        data: Its contents.
    """
    raw = data.encode() if isinstance(data, str) else data
    staged = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    # 0666 less the umask, as any other file: not the 0600 of `tempfile`, and not more than the user allows.
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A named pipe would let its opener wait for somebody who writes.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def make_way(*, files: Iterable[Path] = (), directories: Iterable[Path] = ()) -> None:
    """Move aside what lies where files or directories are to be put and is none, and say where it lies now.

    What a link leads to counts; one that leads nowhere is moved itself.

    Args:
        files: Where regular files go.
        directories: Where directories go.
    """
    for paths, is_fitting in ((files, os.path.isfile), (directories, os.path.isdir)):
        for path in paths:
            if os.path.lexists(path) and not is_fitting(path):
                aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
                os.replace(path, aside)
                logger.warning("%s was in the way of this run and is no part of it. It lies in %s now.", path, aside)


def json_text(value: object) -> str:
    """Return valid JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
