"""Unfinished small files that killed processes have left in a run directory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

_UNFINISHED = re.compile(r"\..+\.[0-9a-z_]{8}\.tmp|\.(metrics|digests)\.jsonl\.tmp|\.rank-.+\.trace\.json\.tmp")
_DIRECTORIES = ("", "metadata", "heartbeats", "profiles")
_YOUNG_SECONDS = 60.0


def is_unfinished(name: str) -> bool:
    """Whether a file of that name is one that was not finished, or is being written."""
    return _UNFINISHED.fullmatch(name) is not None


def litter_in_run(run: Path) -> list[Path]:
    """Return the unfinished files in a run directory, sorted; its checkpoints are not looked at."""
    found = []
    # What a link leads to is the user's.
    for directory in (run / name for name in _DIRECTORIES if not (name and os.path.islink(run / name))):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            found += [Path(e.path) for e in entries if is_unfinished(e.name) and e.is_file(follow_symlinks=False)]
    return sorted(found)


def remove_litter(run: Path) -> None:
    """Remove them. To be called by the one writer of the directory; what cannot be removed is in nobody's way."""
    for file in litter_in_run(run):
        with contextlib.suppress(OSError):
            # Other ranks of this start may be writing their first heartbeats.
            if (
                file.parent == run
                or file.parent.name == "metadata"
                or time.time() - file.stat().st_mtime > _YOUNG_SECONDS
            ):
                file.unlink()
