"""Replace a file as a whole: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write `content` beside `path` and move it there in one step.

    One writer a path: the staging name is fixed, so that a killed writer leaves at most one hidden file, which the next
    write takes over.

    Args:
        path: The file to create or replace; its directory must exist.
        content: Text (written as UTF-8, bytes that are not UTF-8 kept by `surrogateescape`) or bytes.
        durable: Wait until the content and the new name are on the disk.

    Raises:
        OSError: If the directory cannot be written; the old file is left as it was.
    """
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    staged = path.with_name(f".{path.name}.tmp")
    try:
        with open(staged, "wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable, where the platform can."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # Windows cannot open a directory; its renames need no such help.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
