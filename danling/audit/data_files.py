"""The files that data sets read, by size and date, as far as their objects name them."""

from __future__ import annotations

import io
import os
import time
import types
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import PurePath
from stat import S_ISREG

from torch import Tensor, nn

_MOST_FILES = 1000
_MOST_VALUES = 50_000
_MOST_FAILED = 2000
"""Texts that look like paths and are none, after which no more are tried: sentences, say."""
_BEGAN = time.time()
_LONGEST_PATH = 4096
_LEFT = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Tensor, nn.Module)
_SEQUENCES = (list, tuple, deque, set, frozenset)
MORE = "more"
"""Entry that stands for what was not looked at."""


def data_files(roots: Iterable[object]) -> dict[str, str]:
    """Return the files that objects name, by absolute path, each with its size and the time of its last change.

    Attributes, entries of mappings, lists and tuples, open files and mapped arrays are looked at; nothing of the user's is called. Files
    that have changed since the program began are its own, and left out. At most a thousand are noted, and the entry `more` says so: to
    look at millions would hold up a start.

    Args:
        roots: Data sets, or paths.
    """
    found: dict[str, str] = {}
    seen: dict[int, object] = {}
    waiting, looked, failed = deque(roots), 0, 0
    while waiting:
        value = waiting.popleft()
        looked += 1
        if looked > _MOST_VALUES or len(found) >= _MOST_FILES:
            return {**found, MORE: f"only {len(found)} were looked at"}
        name = _name_of(value)
        if name is not None:
            path = os.path.abspath(name)
            if name and path not in found and failed < _MOST_FAILED:
                fact = _fact(path)
                failed += fact is None
                found.update({path: fact} if fact is not None else {})
        elif id(value) not in seen and not isinstance(value, _LEFT):
            seen[id(value)] = value
            waiting.extend(_held_by(value))
    return found


def _name_of(value: object) -> str | None:
    """Return the path that a value may be, `None` where it is something else; empty for a text with neither a separator nor a dot."""
    if isinstance(value, PurePath):
        return os.fspath(value)
    if isinstance(value, str):
        may_be = 0 < len(value) < _LONGEST_PATH and not any(sign in value for sign in "\0\n")
        return value if may_be and (os.sep in value or ("." in value and " " not in value)) else ""
    if isinstance(value, io.IOBase):
        try:
            name = getattr(value, "name", None)
        except Exception:  # one whose buffer was detached
            name = None
        return name if isinstance(name, str) else ""
    return None


def _held_by(value: object) -> Iterable[object]:
    if isinstance(value, Mapping) and isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, _SEQUENCES):
        return list(value)
    try:
        held = value.__dict__
    except Exception:  # a proxy that answers with an error of its own
        return ()
    return list(held.values()) if isinstance(held, dict) else ()


def _fact(path: str) -> str | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # What was written since the program began is its own, and the date of a directory is that of the last run within it.
    if not S_ISREG(status.st_mode) or status.st_mtime >= _BEGAN:
        return None
    changed = datetime.fromtimestamp(status.st_mtime, timezone.utc).isoformat(timespec="seconds")
    return f"{status.st_size} bytes, {changed}"
