"""Notes that ranks leave for each other during training: no collective, and none of them has to be there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from danling.utils.files import read_text, write_atomically

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

_PATIENCE_SECONDS = 3.0
"""How long one look may take: the process that keeps the store may be gone."""

_NO_STORE = (RuntimeError, ValueError, AttributeError)
"""Errors where the store does not answer, where it is gone, and where it allows no second connection."""

_FILE_CLOCK_SECONDS = 1.0
"""By how much the time of a file may lag behind the clock: the kernel takes that of its last tick, and some file systems whole seconds."""

_FOLDER = "notes"


class Board:
    """Notes in the store of a job, over its own connection: a thread that waits in the store does not hold it up.

    Where the store does not answer, since the process that keeps it is gone, notes are files in a directory that all ranks may see.

    Args:
        store: Returns what all ranks share; see `default_store`.
        name: What the notes are about; another one for each training.
        directory: Returns the directory of the files; `None` for no such notes.
    """

    def __init__(self, store: Callable[[], Store], name: str, *, directory: Callable[[], Path] | None = None) -> None:
        self._open = store
        self._name = f"danling/board/{name}"
        self._store: Store | None = None
        self._is_gone = False
        self._began = time.time() - _FILE_CLOCK_SECONDS
        self._directory = directory

    def write(self, key: str, text: str) -> None:
        """Leave a note, in the place of an earlier one.

        Args:
            key: What it is found by.
            text: The note.
        """
        if not self._is_gone:
            try:
                self._answer(lambda store: store.set(f"{self._name}/{key}", text))
                return
            except _NO_STORE:
                self._is_gone = True
        if self._directory is not None:
            with suppress(OSError):
                folder = self._directory() / _FOLDER
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / key.replace("/", "-"), text)

    def read(self, key: str) -> str | None:
        """Return a note, `None` where there is none.

        Args:
            key: What it is found by.
        """
        name = f"{self._name}/{key}"
        if not self._is_gone:
            try:
                return self._answer(lambda store: store.get(name).decode() if store.check([name]) else None)
            except _NO_STORE:
                self._is_gone = True
        if self._directory is None:
            return None
        file = self._directory() / _FOLDER / key.replace("/", "-")
        try:
            # An older file comes from a job that is over.
            return read_text(file) if file.stat().st_mtime >= self._began else None
        except (OSError, ValueError):
            return None

    def _answer(self, ask: Callable[[Store], _T]) -> _T:
        """Return what the store says, if it says so in time: torch waits for ever for one whose process is stopped."""
        answers: list[_T] = []
        errors: list[Exception] = []

        def go() -> None:
            try:
                answers.append(ask(self._connected()))
            except Exception as error:
                errors.append(error)

        asking = threading.Thread(target=go, name="danling-board", daemon=True)
        asking.start()
        asking.join(_PATIENCE_SECONDS)
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError(
                f"Expected the store to answer within {_PATIENCE_SECONDS:g} s. Received: nothing. The notes are files now."
            )
        return answers[0]

    def _connected(self) -> Store:
        if self._store is None:
            # Of which torch's own description knows nothing.
            shared: Any = self._open()
            self._store = shared.clone()
            self._store.set_timeout(timedelta(seconds=_PATIENCE_SECONDS))
        return self._store
