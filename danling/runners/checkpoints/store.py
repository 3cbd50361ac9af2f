"""What a manager asks of the place where its checkpoints lie. All of it runs on rank 0."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path

from . import storage
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .policy import Line, Record, newest, next_line, on_line, to_delete

logger = logging.getLogger("danling")


class CheckpointStore(ABC):
    """The checkpoints of one run in one directory.

    Args:
        directory: The directory; it need not exist yet.
        run_id: Identity of the run.
    """

    def __init__(self, directory: Path, *, run_id: str) -> None:
        self.directory = directory
        self.run_id = run_id
        self._told: set[str] = set()

    @abstractmethod
    def recover(self) -> None:
        """Finish or undo what a save that was killed has begun."""

    @abstractmethod
    def records(self, *, complete: bool) -> list[Record]:
        """Return what manifests record, oldest first. Checkpoints with missing or cut files are logged.

        Args:
            complete: Leave those out. They count for the order of saves, and not as something to load or to keep.
        """

    @abstractmethod
    def record(self, path: Path) -> Record:
        """Return what is recorded of the checkpoint at a path.

        Raises:
            CheckpointDamaged: If its manifest cannot be read.
        """

    @abstractmethod
    def path(self, name: str) -> Path:
        """Return where a name of this directory lies, whether or not it is there."""

    @abstractmethod
    def locate(self, source: Path) -> Path | None:
        """Return the checkpoint that a path means, if there is one."""

    @abstractmethod
    def verify(self, path: Path, level: str) -> None:
        """Compare a checkpoint with its manifest.

        Raises:
            CheckpointDamaged: If they differ; every file that does is named.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one name."""

    @abstractmethod
    def sweep(self, protected: set[int]) -> None:
        """Remove what no name leads to any more, except the saves with these sequences."""

    def resolve(self, source: str | Path) -> Path:
        """Return the checkpoint that a name or a path means.

        Raises:
            CheckpointNotFound: If there is none.
        """
        text = str(source)
        plain = "/" not in text and not text.startswith(".")
        found = self.locate(self.path(text)) if plain else None
        found = found or self.locate(Path(source))
        if found is None:
            present = sorted({record.name for record in self.records(complete=True)})
            raise CheckpointNotFound(
                f"Expected a checkpoint: a name in {self.directory} (there are: {', '.join(present) or 'none'}), or a path. "
                f"Received: {text!r}."
            )
        return found

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint lies in the directory of this store."""
        return self.directory.resolve() in path.resolve().parents

    def refuse_foreign(self, records: list[Record]) -> None:
        """Refuse a directory in which another run saves.

        Raises:
            CheckpointMismatch: If it holds one of another run.
        """
        foreign = next((record for record in records if record.run != self.run_id), None)
        if foreign is not None:
            raise CheckpointMismatch(
                f"Expected {self.directory} to hold checkpoints of this run ({self.run_id}). Received: {foreign.name} of run "
                f"{foreign.run}. Give this run a directory of its own."
            )

    def open_line(self, resumed: Record | None) -> Line:
        """Make the directory ready for saves, and return where they belong.

        Raises:
            CheckpointMismatch: If another run saves there.
        """
        storage.make_directory(self.directory)
        self.recover()
        records = self.records(complete=False)
        self.refuse_foreign(records)
        line = next_line(records, resumed)
        abandoned = {r.sequence for r in records if not on_line(r, line.branch, line.ancestors)}
        if abandoned:
            origin = f"from {resumed.name}" if resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.", origin, len(abandoned), self.directory
            )
        return line

    def find_latest(self, level: str) -> str | None:
        """Return the name of the newest checkpoint of the line that was saved last which verifies, or `None` without one."""
        records = self.records(complete=False)
        self.refuse_foreign(records)
        last = newest(records)
        if last is None:
            return None
        line = [r for r in records if r.name != "model" and on_line(r, last.branch, last.line)]
        for record in sorted(line, key=lambda r: (r.sequence, r.name == "latest"), reverse=True):
            try:
                self.verify(self.path(record.name), level)
            except CheckpointError as error:
                logger.warning("auto_resume passes over %s: %s", record.name, error)
            else:
                return record.name
        return None

    def prune(self, line: Line, *, keep: int, resumed: Record | None) -> None:
        """Remove the history that retention gives up. What cannot be removed is tried again at the next save."""
        try:
            records = [r for r in self.records(complete=True) if on_line(r, line.branch, line.ancestors)]
            protected = {r.sequence for r in records if r.name in ("latest", "best")}
            if resumed is not None:
                protected.add(resumed.sequence)
            for name in to_delete(records, keep=keep, protected=protected):
                self.delete(name)
            self.sweep(protected)
        except OSError as error:
            logger.warning("Could not remove old checkpoints in %s: %s", self.directory, error)

    def describe(self, path: Path) -> Record | None:
        """Return the record of a checkpoint of this directory; `None` for one that lies elsewhere.

        Raises:
            CheckpointMismatch: If it belongs to another run.
        """
        if not self.owns(path):
            return None
        record = self.record(path)
        self.refuse_foreign([record])
        return record

    def pass_over(self, path: Path, error: CheckpointDamaged) -> None:
        """Say, once, that a checkpoint does not count."""
        message = f"{path} does not count as a checkpoint: {error}"
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)
