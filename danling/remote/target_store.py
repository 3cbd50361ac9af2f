"""Sharded checkpoints in an object store as a manager sees them: to verify one is to bring it here."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.policy import is_name
from danling.checkpoints.target_store import SUMS, TARGETS, TargetStore, is_target
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import refuse_link

from .records import RemoteCheckpoints
from .store import is_url
from .stored_run import Described


class RemoteTargets(RemoteCheckpoints, TargetStore):
    """The sharded checkpoints of a run in a store. A path is that of the target in the directory to which it is brought."""

    is_file = False

    def is_used(self) -> bool:
        """Whether there is a target in the store."""
        return bool(self.run.listed.complete)

    def path(self, name: str) -> Path:
        """Return where the target that a name leads to is brought to: not that of the name, which may lead to another one here."""
        try:
            found = self._found.named(name)
        except CheckpointDamaged:
            found = None
        return super().path(found.target if found is not None and found.target else name)

    def find(self, source: str | Path) -> Path | None:
        """Return where the target of a name or path of the directory is brought to, if there is one in the store."""
        path = Path(source)
        own = path.parent in (Path("."), self.directory, self.directory / TARGETS) and not is_url(str(source))
        known = own and (is_name(path.name) or is_target(path.name)) and self._found.named(path.name) is not None
        return self.path(path.name) if known else None

    def target(self, path: Path) -> Path:
        """Return the path itself: it is that of a target."""
        return path

    def verify(self, path: Path, level: str) -> None:
        """Bring a target here, and the names that lead to it."""
        found = self._described(path)
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        self._stage(found, path)

    def _stage(self, found: Described, path: Path) -> None:
        refuse_link(self.directory / TARGETS)
        storage.make_directory(self.directory / TARGETS)
        storage.require_space(self.directory, sum(size for size, _ in found.manifest.files.values()))
        self._make_way(path)
        storage.make_directory(path)
        try:
            for file in found.manifest.files:
                storage.write_file(path / file, partial(self.run.download, found, file))
            storage.sync_directory(path)
            storage.write_text(path / SUMS, found.manifest.text())
        except BaseException:
            self.give_up(path.name)
            raise
        self.publish(path.name, [name for name, target in self._pointers() if target == path.name])

    def _make_way(self, path: Path) -> None:
        if os.path.isdir(path):
            # It was found damaged, or unfinished. The manifest goes first: without it nothing of it counts.
            storage.remove(path / SUMS)
            storage.remove_tree(path)

    def _pointers(self) -> list[tuple[str, str | None]]:
        names = sorted(self.run.listed.pointers, key=lambda name: name == "latest")
        found = self._found.described(complete=True)
        targets = {described.name: described.target for described in found}
        return [(name, targets.get(name)) for name in names]

    def bring(self, path: Path) -> None:
        """Bring a target to this machine, where the directory is not that of the main process."""
        if is_first_on_machine() and storage.size_of(path / SUMS) is None:
            self.verify(path, "full")
