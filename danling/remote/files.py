"""The run's other files in a store: metrics, results, metadata, logs, TensorBoard events."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from danling.workspace.litter import is_unfinished

from .layout import RunLayout
from .store import RemoteStore

logger = logging.getLogger("danling")

_DIRECTORIES = ("metadata", "logs", "tensorboard")
_FILES = ("metrics.jsonl", "results.json", "latest.json", "best.json", "streams.json", "digests.jsonl")


class FileMirror:
    """Copies the files of a run directory that have changed since they were copied last. On one thread.

    Args:
        store: The store.
        layout: Keys of the run.
        directory: The run directory.
    """

    def __init__(self, store: RemoteStore, layout: RunLayout, directory: Path) -> None:
        self._store = store
        self._layout = layout
        self._directory = directory
        self._copied: dict[str, tuple[int, int]] = {}
        self._unread: set[str] = set()

    def copy(self) -> None:
        """Copy what has changed. A file that is being written to goes up as it is now, and again the next time.

        Raises:
            RemoteError: If the store does not take it.
        """
        for path in run_files(self._directory):
            name = path.relative_to(self._directory).as_posix()
            try:
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    continue  # a pipe would be waited for
                state = (found.st_size, found.st_mtime_ns)
                if self._copied.get(name) == state:
                    continue
                # Read at once: what is appended meanwhile must not go up in part.
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                # A save is worth more than a log that cannot be read.
                if name not in self._unread:
                    self._unread.add(name)
                    logger.warning("%s is not copied to %s: %s", path, self._store.url, error)
                continue
            self._store.put(self._layout.file(name), content)
            self._copied[name] = state


def run_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a run directory that belong to the run, apart from its checkpoints.

    Args:
        directory: The run directory.
    """
    for name in _FILES:
        if (directory / name).is_file():
            yield directory / name
    for name in _DIRECTORIES:
        for place, _, files in os.walk(directory / name):
            yield from (Path(place, file) for file in sorted(files) if not is_unfinished(file))
