"""The other files of a run in a store, brought to a machine that goes on with it: metrics, results, metadata, logs, events."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from danling.checkpoints import storage
from danling.utils.files import is_plain_path

from .layout import RunLayout
from .store import RemoteObject, RemoteStore


def bring_files(store: RemoteStore, layout: RunLayout, directory: Path, *, below: str = "") -> list[Path]:
    """Bring what is missing in a run directory, or shorter there than in the store, so that its curves go on."""
    found = (
        (entry, entry.key[len(layout.files) + 1 :])
        for entry in store.list(layout.file(below) if below else layout.files)
    )
    brought = (bring_object(store, entry, name, directory) for entry, name in found)
    return [path for path in brought if path is not None]


def bring_object(store: RemoteStore, found: RemoteObject, name: str, directory: Path) -> Path | None:
    """Bring an object to a directory, and return its path; `None` where as much of it lies there already."""
    path = directory / name
    if not is_plain_path(name) or (storage.size_of(path) or -1) >= found.size:
        return None
    storage.make_directory(path.parent)
    _bring(store, found, path)
    return path


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
