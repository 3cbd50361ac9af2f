"""The other files of a run in a store, brought to a machine that goes on with it: metrics, results, metadata, logs, events."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath

from danling.checkpoints import storage

from .layout import RunLayout
from .store import RemoteObject, RemoteStore


def bring_files(store: RemoteStore, layout: RunLayout, directory: Path) -> list[Path]:
    """Bring what is missing in a run directory, or shorter there than in the store, so that its curves go on.

    Args:
        store: A client.
        layout: Keys of the run.
        directory: The run directory.

    Returns:
        The files that were brought.
    """
    brought = []
    for found in store.list(layout.files):
        path = _path_of(found.key[len(layout.files) + 1 :], directory)
        if path is None or (storage.size_of(path) or -1) >= found.size:
            continue
        storage.make_directory(path.parent)
        _bring(store, found, path)
        brought.append(path)
    return brought


def _path_of(name: str, directory: Path) -> Path | None:
    """Return where a file belongs; `None` for a name that leads out of the directory."""
    parts = PurePosixPath(name).parts
    return directory.joinpath(*parts) if parts and ".." not in parts and not name.startswith("/") else None


def _bring(store: RemoteStore, found: RemoteObject, path: Path) -> None:
    staged = storage.staged_name(path.parent)
    storage.write_file(staged, partial(_pour, store, found.key))
    try:
        # The time is that of the last change of the run, not of this copy.
        os.utime(staged, (found.modified.timestamp(), found.modified.timestamp()))
        storage.replace(staged, path)
    except BaseException:
        storage.discard(staged)
        raise


def _pour(store: RemoteStore, key: str, writer: storage.HashingWriter) -> None:
    for piece in store.chunks(key):
        writer.write(piece)
