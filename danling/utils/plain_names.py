"""Names that come out of files, archives and object stores: what may become a path here, and what never does."""

from __future__ import annotations

import os
import re

_LONGEST = 4096
_LONGEST_PART = 255
_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


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
    if "\\" in name or _CONTROL.search(name) or _DRIVE.match(name):
        return False
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    return size <= _LONGEST and all(
        part not in ("", ".", "..") and len(os.fsencode(part)) <= _LONGEST_PART for part in parts
    )
