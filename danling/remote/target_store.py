"""Sharded checkpoints in an object store as a manager sees them: brought here whole, or read in parts where they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.outline import READ_WHOLE
from danling.checkpoints.policy import is_name
from danling.checkpoints.target_store import RUNNER_FILE, SUMS, TARGETS, TargetStore, is_target
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import refuse_link

from .records import RemoteCheckpoints
from .store import is_url
from .stored_pieces import StoredPieces
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
        """Bring a target here, and the names that lead to it; or compare sizes alone, where it is read in parts that are verified then."""
        found = self._described(path)
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        if not self.run.is_divisible(found):
            self._stage(found, path)

    def pieces(self, path: Path) -> StoredPieces | None:
        """Return the files of a target, which stays in the store where every rank can read its own part of it."""
        found = self._described(path)
        return StoredPieces(self.run, found) if self.run.is_divisible(found) else None

    def bring_outline(self, path: Path) -> None:
        """Bring a target without the contents of its tensors: a copy for those who look, which nobody may resume from.

        Of an engine that is what the runner has saved beside it. A target that cannot be read in parts is brought whole.
        """
        found = self._described(path)
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        files = found.manifest.files
        if RUNNER_FILE not in files and not self.run.is_divisible(found):
            self._stage(found, path)
            return
        storage.make_directory(path)
        for file, (size, _) in files.items():
            with (path / file).open("wb") as hollow:
                hollow.truncate(size)
        if RUNNER_FILE in files:
            storage.write_file(path / RUNNER_FILE, partial(self.run.download, found, RUNNER_FILE))
        else:
            with closing(StoredPieces(self.run, found)) as pieces:
                _fill_in(path, pieces, {file: size for file, (size, _) in files.items()})
        storage.write_text(path / SUMS, found.manifest.text())

    def bring_whole(self, path: Path) -> None:
        """Bring all of a target here, whether or not it could be read in parts."""
        self._stage(self._described(path), path)

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
            self.verify(path, "full")  # nothing where it is read in parts


def _fill_in(target: Path, pieces: StoredPieces, sizes: Mapping[str, int]) -> None:
    """Write all but weights to the hollow files of a target: plain values, sections that are read whole, files without tensors."""
    with_tensors = {extent.file for extent in pieces.index.extents()}
    wanted: dict[str, list[tuple[int, int]]] = {
        file: [] if file in with_tensors else [(0, size)] for file, size in sizes.items()
    }
    small = [chunk for entry in pieces.index.tensors.values() if entry.path[0] in READ_WHOLE for chunk in entry.chunks]
    for extent in [part.extent for part in small] + [value.extent for value in pieces.index.values.values()]:
        wanted[extent.file].append((extent.offset, extent.length))
    pieces.bring(wanted)
    for file, ranges in wanted.items():
        with (target / file).open("r+b") as copy:
            for start, length in ranges:
                brought = pieces.open(file)
                brought.seek(start)
                copy.seek(start)
                copy.write(brought.read(length))
