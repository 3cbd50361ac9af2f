"""A directory that nothing may touch, in which links of a hostile directory lead."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

FILES = (
    "file.txt",
    "ckpt-s000000000001.pth",
    "targets/00000001-aaaaaaaa/manifest.sha256",
    "below/kernel.so",
    ".lock",
)


def make_canary(directory: Path) -> Path:
    """Fill a directory with files of the names that this library removes or writes elsewhere, and return it."""
    for name in FILES:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"a user's work: {name}")
    return directory


def look_at(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return what there is in a directory, itself included: kinds, rights, inodes, times, links and contents."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([directory, *directory.rglob("*")]):
        about = os.lstat(path)
        content: object = None
        if stat.S_ISREG(about.st_mode):
            content = (
                hashlib.sha256(path.read_bytes()).hexdigest()
                if about.st_size < 1 << 30
                else about.st_size
            )
        elif stat.S_ISLNK(about.st_mode):
            content = os.readlink(path)
        found[str(path)] = (about.st_mode, about.st_uid, about.st_ino, about.st_mtime_ns, content)
    return found
