"""What the checkpoints of a run in one location have in common, however they are arranged there: found, listed, verified, pruned.

`FileStore` (`file_store.py`) and `TargetStore` (`target_store.py`) are the two ways in which checkpoints are arranged on the disk. What
stores do runs on rank 0, communicates nothing and needs no torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from . import storage
from .errors import CheckpointDamaged
from .manifest import Manifest, Record, damaged, is_name, to_delete

logger = logging.getLogger("danling")

SUFFIX = ".pth"


class CheckpointStore:
    """The checkpoints of one run in one location."""

    is_elsewhere: ClassVar[bool] = False
    """Whether checkpoints are elsewhere, and are brought into the directory by `verify`."""

    def __init__(self, directory: Path) -> None:
        self.is_partial = False
        """Whether other machines have the rest of each checkpoint, so that none can be read here."""
        self.directory = directory
        self._pinned: storage.Pinned | None = None
        self._skipped: dict[Path | str, str] = {}

    @property
    def location(self) -> str:
        """Where these checkpoints are, for errors."""
        return str(self.directory)

    def shown(self, path: Path | str) -> str:
        """Return a path as users know it."""
        return str(path)

    # Finding

    def path(self, name: str) -> Path:
        """Return the path of a name of this directory, whether or not it exists."""
        raise NotImplementedError

    def path_of(self, record: Record) -> Path:
        """Return the path of a checkpoint that `records` has returned."""
        return self.path(record.name)

    def locate(self, source: Path) -> Path | None:
        """Return the checkpoint that a path means: itself, or `latest` in a checkpoint or run directory."""
        return None

    def find(self, source: str | Path) -> Path | None:
        """Return the checkpoint that a name or a path means, if there is one."""
        # A bare name is that of a checkpoint here first: a file of that name in the working directory
        # must not be loaded instead.
        text = str(source)
        plain = "/" not in text and not text.startswith(".")
        found = self.locate(self.path(text)) if plain else None
        return found or self.locate(Path(source))

    def target(self, path: Path) -> Path:
        """Return the file or directory that a checkpoint at `path` is read from."""
        return path

    def listed(self) -> list[Path]:
        """Return every checkpoint, those of which only the checksums are left included."""
        return []

    def records(self, *, complete: bool) -> list[Record]:
        """Return what manifests record, oldest first. Checkpoints with missing or cut files are logged."""
        found = []
        for path in self.listed():
            try:
                manifest, problems = self.examine(path, "size")
            except CheckpointDamaged as error:
                self.skip(path, error)
                continue
            if problems:
                self.skip(path, damaged(problems, self.shown(path)))
            if not (problems and complete):
                # Several names may lead to one save, whose record has one of them.
                found.append(replace(manifest.record, name=path.name.removesuffix(SUFFIX)))
        return sorted(found, key=lambda record: (record.sequence, record.name))

    def describe(self, path: Path) -> Record | None:
        """Return the record of a checkpoint of this directory; `None` for one in another directory."""
        return self.record(path) if self.owns(path) else None

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint is in the directory of this store."""
        # pathlib raises where links lead to each other.
        return Path(os.path.realpath(self.directory)) in Path(os.path.realpath(path)).parents

    def record(self, path: Path) -> Record:
        """Return the record of the checkpoint at a path."""
        return self.examine(path, "none")[0].record

    # Verifying

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        """Return the manifest of a checkpoint, and every way in which its files differ from it."""
        raise NotImplementedError

    def verify(self, path: Path, level: str) -> None:
        """Compare a checkpoint with its manifest, and raise `CheckpointDamaged` if it differs."""
        if level != "none":
            problems = self.examine(path, level)[1]
            if problems:
                raise damaged(problems, path)

    def bring(self, path: Path) -> None:
        """Make a checkpoint that was verified on rank 0 readable at its path by every process. Called on all ranks."""

    def skip(self, path: Path | str, error: Exception) -> None:
        """Log, once for each reason, that a checkpoint does not count."""
        # The same checkpoints are listed again at each save.
        if self._skipped.get(path) != str(error):
            self._skipped[path] = str(error)
            logger.warning("%s is skipped: %s", self.shown(path), error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint that was skipped and of which something is left."""
        return [
            f"{path}: {why}"
            for path, why in self._skipped.items()
            if isinstance(path, Path)
            and is_name(path.name.removesuffix(path.suffix))
            and storage.absence(path) != storage.MISSING
        ]

    # Removing

    def recover(self) -> None:
        """Finish or undo the changes that a killed save has begun."""

    def litter(self) -> list[Path]:
        """Return the files that killed saves and deletions have left where no process writes."""
        return []

    def pin(self) -> None:
        """Remember the directory in which this run saves: in one that takes its path later nothing is removed."""
        self._pinned = storage.Pinned(self.directory)

    def refuse_links(self) -> None:
        """Refuse a link in the place of a directory in which saves are made."""

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def sweep(self, protected: set[int], *, run: str) -> None:
        """Remove what no name of a run leads to any more, except the saves with these sequences."""

    def prune(
        self, *, run: str, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()
    ) -> None:
        """Remove the history of a run that retention gives up. What cannot be removed is tried again at the next save."""
        try:
            # Those of an abandoned branch count too: else they would stay for ever.
            records = [record for record in self.records(complete=True) if record.run == run]
        except OSError as error:
            # The save itself is complete: a run does not end because of an old one.
            logger.warning(
                "Could not see which checkpoints in %s are old: %s", self.directory, error
            )
            return
        protected = {
            record.sequence for record in records if record.name in ("latest", "best")
        } | pending
        if resumed is not None:
            protected.add(resumed.sequence)
        for name in to_delete(records, keep=keep, protected=protected):
            self._try_to(partial(self.delete, name))
        self._try_to(partial(self.sweep, protected, run=run))

    def _try_to(self, remove: Callable[[], None]) -> None:
        try:
            remove()
        except OSError as error:
            logger.warning("An old checkpoint in %s is still there: %s", self.directory, error)
