"""The runs of one configuration, side by side: `<id>`, `<id>-2`, `<id>-3`, ..., in the order they were begun."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from danling.utils.files import open_file
from danling.utils.locks import WRITING

LOCK = ".lock"
"""File in a run directory that its writer holds a lock on."""

_CHECKPOINT = re.compile(r"(latest|best|model|ckpt-(e\d+|s\d+))(\.pth(\.sha256(\.next)?)?)?")
_TARGETS, _MANIFEST = "targets", "manifest.sha256"
_NUMBERED = re.compile(r"(.+)-([1-9]\d*)")


def member(id: str, number: int) -> str:
    """Return the name of the directory of the `number`-th run of an id, counted from 1."""
    return id if number == 1 else f"{id}-{number}"


def number_of(name: str, id: str) -> int | None:
    """Return which run of an id a directory of that name holds; `None` when it holds none of it."""
    if name == id:
        return 1
    found = _NUMBERED.fullmatch(name)
    number = int(found[2]) if found and found[1] == id else 0
    return number if number >= 2 and name == member(id, number) else None


def numbers(family: Path, id: str) -> list[int]:
    """Return the numbers of the runs of an id that have a directory, in order."""
    found = (number_of(name, id) for name in _names(family))
    return sorted(number for number in found if number is not None)


def natural_key(name: str) -> tuple[str, int]:
    """Return a key that sorts `id-2` between `id` and `id-10`."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def holds_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint in a directory of checkpoints, complete or not: names are looked at, and nothing is opened."""
    names = _names(directory)
    if any(_CHECKPOINT.fullmatch(name) for name in names):
        return True
    targets = directory / _TARGETS
    return _TARGETS in names and any(_MANIFEST in _names(targets / target) for target in _names(targets))


def holds_figures(run: Path) -> bool:
    """Whether a line of metrics was written in a run directory, or in the part of one of several groups."""
    return any(has_line(path) for path in (run / "metrics.jsonl", *(part / "metrics.jsonl" for part in parts(run))))


def background_writers(checkpoints: Path) -> list[Path]:
    """Return the files that processes have locked, or had when they were killed, which write into a directory of checkpoints."""
    return sorted(checkpoints / name for name in _names(checkpoints) if name.startswith(WRITING))


def parts(run: Path) -> Iterator[Path]:
    """Yield the directories that a run directory has below it, in each of which one of several groups may write."""
    return (run / name for name in sorted(_names(run)) if (run / name).is_dir())


def has_line(file: Path) -> bool:
    """Whether a file has a whole line, or cannot be read: it may be somebody's."""
    try:
        with open_file(file) as lines:
            return b"\n" in lines.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return set()
        raise
