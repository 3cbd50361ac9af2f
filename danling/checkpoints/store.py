"""What a manager asks of the place where its checkpoints lie. All of it runs on rank 0."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import ClassVar

from . import storage
from .manifest import Manifest
from .policy import Line, Record, is_name, on_line, to_delete

logger = logging.getLogger("danling")


class CheckpointStore(ABC):
    """The checkpoints of one run in one directory."""

    is_elsewhere: ClassVar[bool] = False
    """Whether checkpoints lie in another place than the directory, and are brought there by `verify`."""

    def __init__(self, directory: Path, *, run_id: str) -> None:
        self.is_part = False
        """Whether other machines have the rest of each checkpoint, so that none can be read here."""
        self.directory = directory
        self.run_id = run_id
        self._passed: dict[Path, str] = {}

    def is_used(self) -> bool:
        """Whether there may be something of this kind in the directory."""
        return True

    @abstractmethod
    def recover(self) -> None:
        """Finish or undo what a save that was killed has begun."""

    @abstractmethod
    def records(self, *, complete: bool) -> list[Record]:
        """Return what manifests record, oldest first. Checkpoints with missing or cut files are logged."""

    @abstractmethod
    def record(self, path: Path) -> Record:
        """Return what is recorded of the checkpoint at a path."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """Return where a name of this directory lies, whether or not it is there."""

    @abstractmethod
    def locate(self, source: Path) -> Path | None:
        """Return the checkpoint that a path means, if there is one."""

    @abstractmethod
    def verify(self, path: Path, level: str) -> None:
        """Compare a checkpoint with its manifest."""

    @abstractmethod
    def claims(self, path: Path) -> bool:
        """Whether a path, which need not be there any more, is that of a checkpoint of this kind."""

    @abstractmethod
    def listed(self) -> list[Path]:
        """Return every checkpoint in the directory, those of which only the checksums are left included."""

    @abstractmethod
    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        """Return the manifest of a checkpoint, and every way in which what is there differs from it."""

    def lacks_sums(self, path: Path) -> bool:
        """Whether a checkpoint was copied without the checksums that belong beside it."""
        return False

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one name."""

    @abstractmethod
    def sweep(self, protected: set[int]) -> None:
        """Remove what no name leads to any more, except the saves with these sequences."""

    def find(self, source: str | Path) -> Path | None:
        """Return the checkpoint that a name or a path means, if there is one."""
        text = str(source)
        plain = "/" not in text and not text.startswith(".")
        return (self.locate(self.path(text)) if plain else None) or self.locate(Path(source))

    def target(self, path: Path) -> Path:
        """Return what is read when a checkpoint at `path` is."""
        return path

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint lies in the directory of this store."""
        # pathlib raises where links lead to each other.
        return Path(os.path.realpath(self.directory)) in Path(os.path.realpath(path)).parents

    def prune(self, line: Line, *, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Remove the history that retention gives up. What cannot be removed is tried again at the next save."""
        try:
            records = [r for r in self.records(complete=True) if on_line(r, line.branch, line.ancestors)]
            protected = {r.sequence for r in records if r.name in ("latest", "best")}
            protected |= pending
            if resumed is not None:
                protected.add(resumed.sequence)
        except OSError as error:
            logger.warning("Could not see which checkpoints in %s are old: %s", self.directory, error)
            return
        for name in to_delete(records, keep=keep, protected=protected):
            self._spared(partial(self.delete, name))
        self._spared(lambda: self.sweep(protected))

    def held(self) -> set[str]:
        """Return the names of what lies here of saves of which each machine has a part."""
        return set()

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        """Remove the part of older saves that this machine has, where the main process has removed its own."""
        return

    def _spared(self, removal: Callable[[], None]) -> None:
        try:
            removal()
        except OSError as error:
            logger.warning("An old checkpoint in %s is still there: %s", self.directory, error)

    @property
    def place(self) -> str:
        """Where these checkpoints lie, for errors."""
        return str(self.directory)

    def bring(self, path: Path) -> None:
        """See to it that a checkpoint which was verified on rank 0 can be read at its path by every process. Called on all ranks."""
        return

    def describe(self, path: Path) -> Record | None:
        """Return the record of a checkpoint of this directory; `None` for one that lies elsewhere."""
        return self.record(path) if self.owns(path) else None

    def pass_over(self, path: Path, error: Exception) -> None:
        """Say, once for each reason, that a checkpoint does not count."""
        if self._passed.get(path) != str(error):
            self._passed[path] = str(error)
            logger.warning("%s is skipped: %s", path, error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint that was skipped and of which something is left."""
        return [
            f"{path}: {why}"
            for path, why in self._passed.items()
            if is_name(path.name.removesuffix(path.suffix)) and storage.absence(path) != storage.MISSING
        ]

    def moved(self, path: Path, aside: Path | None) -> None:
        """Say where something lies now that was in the way of a save, if anything was."""
        if aside is not None:
            logger.warning("%s was in the way of a checkpoint and is no part of one. It lies in %s now.", path, aside)
