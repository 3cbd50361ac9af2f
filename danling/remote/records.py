"""What the manifests of a run in a store record, and which of its checkpoints do not count."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.file_store import SUFFIX
from danling.checkpoints.policy import Line, Record
from danling.checkpoints.store import CheckpointStore
from danling.checkpoints.target_store import TARGETS, is_target

from .stored_run import Described, StoredRun, chosen

logger = logging.getLogger("danling")


class RemoteRecords:
    """What both kinds of stores know of a run: its records, and which of them do not count.

    Args:
        run: The run.
        file: Whether its file checkpoints are meant, or the others.
    """

    def __init__(self, run: StoredRun, *, file: bool) -> None:
        self.run = run
        self.file = file
        self._skipped: dict[str, str] = {}

    def described(self, *, complete: bool) -> list[Described]:
        """Return what has a whole manifest, oldest first; what has none is skipped.

        Args:
            complete: Leave out what lacks an object. It counts for the order of saves, and not as something to load.
        """
        found = []
        for name, file in self.run.names():
            if file is not self.file:
                continue
            try:
                described = self.run.describe(name, file=file)
            except CheckpointDamaged as error:
                self.skip(name, error)
                continue
            problems = self.run.problems(described)
            if problems:
                self.skip(name, CheckpointDamaged("; ".join(problems)))
            if not (problems and complete):
                found.append(described)
        return sorted(found, key=lambda d: (d.record.sequence, d.name))

    def named(self, name: str) -> Described | None:
        """Return what a name leads to, `None` where there is no such name.

        Raises:
            CheckpointDamaged: If it leads to nothing whole.
        """
        try:
            return chosen(self.run, name, self.file)
        except CheckpointNotFound:
            return None

    def skip(self, name: str, error: Exception) -> None:
        """Say, once for each reason, that a checkpoint does not count.

        Args:
            name: Its name, or that of its target.
            error: Why.
        """
        place = f"{self.run.url}/checkpoints/"
        place += f"{name}{SUFFIX}" if self.file else f"{TARGETS}/{name}" if is_target(name) else name
        if self._skipped.get(place) != str(error):
            self._skipped[place] = str(error)
            logger.warning("%s is skipped: %s", place, error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint that was skipped."""
        return [f"{place}: {why}" for place, why in self._skipped.items()]


class RemoteCheckpoints(CheckpointStore):
    """What a manager asks in the same way of file checkpoints and of sharded ones; a path is that to which one is brought.

    Args:
        directory: Where checkpoints are brought to.
        run: The run in the store.
        run_id: Identity of the run that reads.
        is_home: Whether it is the run that reads; of another one nothing is part of the line of saves.
    """

    is_elsewhere = True
    is_file: ClassVar[bool]
    """Whether its checkpoints are single files."""

    def __init__(self, directory: Path, run: StoredRun, *, run_id: str, is_home: bool = True) -> None:
        super().__init__(directory, run_id=run_id)
        self.run = run
        self.is_home = is_home
        self._found = RemoteRecords(run, file=self.is_file)

    @property
    def place(self) -> str:
        """Where these checkpoints lie, for errors."""
        return self.run.url

    def records(self, *, complete: bool) -> list[Record]:
        """Return what the manifests in the store record, oldest first; a target without a pointer goes by its own name."""
        return [found.record for found in self._found.described(complete=complete)]

    def record(self, path: Path) -> Record:
        """Return what is recorded of the checkpoint that a path is brought from."""
        return self._described(path).record

    def describe(self, path: Path) -> Record | None:
        """Return what is recorded of a checkpoint of the run that reads; `None` for another one, which a URL names."""
        return super().describe(path) if self.is_home else None

    def pass_over(self, path: Path, error: Exception) -> None:
        """Say that a checkpoint does not count."""
        self._found.skip(self._name(path), error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint in the store that was skipped."""
        return self._found.lost()

    def _name(self, path: Path) -> str:
        return path.name.removesuffix(SUFFIX) if self.is_file else path.name

    def _described(self, path: Path) -> Described:
        return self.run.describe(self._name(path), file=self.is_file)

    def recover(self) -> None:
        """Nothing: what killed processes have left in a store is for its writer to remove."""

    def prune(self, line: Line, *, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Nothing: what is kept in a store is for its writer to choose."""
