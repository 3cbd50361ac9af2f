"""Whose checkpoints lie in a directory, read from their manifests alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import storage
from .errors import CheckpointError
from .file_store import SUFFIX
from .file_store import SUMS as FILE_SUMS
from .manifest import Manifest
from .policy import Record
from .reading import read_sections
from .target_store import SUMS, TARGETS


def newest_record(directory: Path) -> Record | None:
    """Return the record of the newest save in a directory of checkpoints, whichever kind of manager made it; nothing is said of what
    cannot be read.
    """
    records = (_record(file) for file in _manifests(directory))
    return max((record for record in records if record is not None), key=lambda r: r.sequence, default=None)


def stored_settings(directory: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the configuration in the newest checkpoint of a directory that can be read, and how many ranks that read different samples
    made it; `None` without one.
    """
    for name in ("latest", f"latest{SUFFIX}", "best", f"best{SUFFIX}"):
        try:
            payload = read_sections(directory / name, ["runner", "state"])
        except (CheckpointError, OSError):
            continue
        elastic = (payload.get("state") or {}).get("elastic") or {}
        return payload.get("runner") or {}, int(elastic.get("data_replicas", elastic.get("world_size", 1)))
    return None


def _manifests(directory: Path) -> Iterator[Path]:
    names = _names(directory)
    yield from (directory / name for name in names if name.endswith(FILE_SUMS))
    yield from (directory / TARGETS / target / SUMS for target in _names(directory / TARGETS))


def _names(directory: Path) -> set[str]:
    try:
        return storage.names(directory)
    except OSError:
        return set()


def _record(file: Path) -> Record | None:
    try:
        return Manifest.parse(storage.read_text(file)).record if storage.size_of(file) is not None else None
    except (CheckpointError, OSError):
        return None
