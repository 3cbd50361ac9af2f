"""From what a user types to a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

from danling.checkpoints.errors import CheckpointNotFound
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.store import CheckpointStore
from danling.checkpoints.target_store import TargetStore

Located = tuple[CheckpointStore, Path]
"""The kind of store, and the file, pointer or target in it."""


def locate(source: str | Path) -> Located:
    """Return the checkpoint that a path means: a file, a pointer, a target, or `latest` of a checkpoint or run directory.

    Args:
        source: The path.

    Raises:
        CheckpointNotFound: If there is none.
    """
    path = Path(source)
    for kind in (FileStore, TargetStore):
        # Only the name of the directory matters here: it is looked for in a run directory.
        store = kind(Path("checkpoints"), run_id="")
        found = store.locate(path)
        if found is not None:
            return store, found
    raise CheckpointNotFound(
        f"Expected a checkpoint file or directory. Received: {str(source)!r}, where there is none."
    )
