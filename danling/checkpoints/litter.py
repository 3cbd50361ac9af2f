"""What killed processes have left in a directory of checkpoints: it is no damage, and the next start of the run removes it."""

from __future__ import annotations

import os
from pathlib import Path

from . import storage
from .errors import CheckpointDamaged
from .file_store import DELETING, SUMS, read_manifest
from .manifest import read_manifest as read_sums
from .policy import Record, is_history
from .target_store import TARGETS, is_target, is_unfinished


def litter_in(directory: Path, *, keep: int = 0) -> list[Path]:
    """Return what killed saves and deletions have left in a directory of checkpoints that nobody writes into, sorted."""
    names = storage.names(directory)
    found = [directory / name for name in names if name.startswith((storage.STAGED, DELETING))]
    found += half_deleted(directory) + pruned_sums(directory, keep)
    targets = directory / TARGETS
    if os.path.isdir(targets):
        found += [
            targets / name for name in storage.names(targets) if is_target(name) and is_unfinished(targets / name)
        ]
    return sorted(set(found))


def half_deleted(directory: Path) -> list[Path]:
    """Return the checksums whose file was removed by a deletion that was killed before it came to them."""
    marked = {name.removeprefix(DELETING) for name in storage.names(directory) if name.startswith(DELETING)}
    orphans = _orphans(directory)
    return [directory / name for name in orphans if Path(name.removesuffix(SUMS)).stem in marked]


def pruned_sums(directory: Path, keep: int) -> list[Path]:
    """Return the sums of history that retention gave up, as an older version left them: without their file, and without a mark."""
    if keep <= 0:
        return []
    names = storage.names(directory)
    whole = [record for name in names if f"{name}{SUMS}" in names and (record := _whole(directory / name)) is not None]
    history = {record.sequence for record in whole if is_history(record.name)}
    found = []
    for name in _orphans(directory):
        record = _recorded(directory / name)
        if record is not None and is_history(record.name) and sum(s > record.sequence for s in history) >= keep:
            found.append(directory / name)
    return found


def _orphans(directory: Path) -> set[str]:
    names = storage.names(directory)
    return {name for name in names if name.endswith(SUMS) and name.removesuffix(SUMS) not in names}


def _whole(path: Path) -> Record | None:
    try:
        return read_manifest(path, "size").record
    except CheckpointDamaged:
        return None


def _recorded(sums: Path) -> Record | None:
    try:
        return read_sums(sums, sums.name).record
    except CheckpointDamaged:
        return None
