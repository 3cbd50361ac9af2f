"""Where the saves of a process belong among those of its run: their numbers, the room for them, and which older ones they replace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import storage
from .errors import CheckpointError
from .mirroring import Mirror
from .policy import Line, Record, next_line, on_line
from .search import CheckpointSearch
from .settings import CheckpointSettings

logger = logging.getLogger("danling")


class SaveLineage:
    """Numbers the saves of a process, and removes those that they replace. Every method but `follow` is called on rank 0."""

    def __init__(
        self, search: CheckpointSearch, settings: CheckpointSettings, *, mirror: Callable[[], Mirror | None]
    ) -> None:
        self._search = search
        self._store = search.stores[0]
        self._settings = settings
        self._mirror = mirror
        self._line: Line | None = None
        self._resumed: Record | None = None

    @property
    def resumed(self) -> Record | None:
        """The checkpoint of the run that the process goes on from; `None` from scratch. Known on all ranks."""
        return self._resumed

    def continue_from(self, record: Record | None) -> None:
        """Begin where a checkpoint is; nothing changes on the disk before the next save. Called on all ranks."""
        self._resumed = record
        self._line = None

    def open_attempt(self, names: list[str], *, needed: int, epoch: int, global_step: int) -> list[Record]:
        """Number the next save, and return its records, one a name."""
        if self._line is None:
            self._line = self._open_line()
        self._make_room(needed)
        self._line = replace(self._line, sequence=self._line.sequence + 1)
        line, run = self._line, self._search.run_id
        return [Record(n, line.sequence, line.branch, line.ancestors, run, global_step, epoch) for n in names]

    def _open_line(self) -> Line:
        """Make the directory ready for saves, and return where they belong."""
        directory = self._search.directory
        storage.make_directory(directory)
        self._store.recover()
        found = self._search.records()
        self._search.refuse_foreign(found)
        records = [record for record, _ in found]
        line = next_line(records, self._resumed)
        abandoned = {r.sequence for r in records if not on_line(r, line.branch, line.ancestors)}
        if abandoned:
            origin = f"from {self._resumed.name}" if self._resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.", origin, len(abandoned), directory
            )
        return line

    def _make_room(self, needed: int) -> None:
        """Refuse a save that the disk has no room for, though what waits to be copied elsewhere is given up for it."""
        directory, mirror = self._search.directory, self._mirror()
        try:
            storage.require_space(directory, needed)
        except CheckpointError:
            given_up = mirror.let_go() if mirror is not None else []
            if not given_up:
                raise
            logger.warning(
                "%s has no room for the next save: %s will not be copied to the object store, and may be removed here.",
                directory,
                ", ".join(given_up),
            )
            self.prune()
            storage.require_space(directory, needed)

    def prune(self) -> None:
        """Remove the history that retention gives up, once a save is there; what is still being copied elsewhere stays."""
        if self._line is None:
            return
        mirror = self._mirror()
        pending = mirror.pending() if mirror is not None else frozenset()
        self._store.prune(self._line, keep=self._settings.keep_latest_k, resumed=self._resumed, pending=pending)

    def follow(self, sequence: int, exchange: Callable[[object], list[Any]], *, is_main: bool) -> None:
        """Remove on machines with disks of their own what the main process has removed on its own. On all ranks, in background too."""
        apart = self._search.apart
        if not apart.any:
            return
        kept = exchange(self._store.held() if is_main else None)[0]
        if apart.follows:
            self._store.follow(sequence, kept)
