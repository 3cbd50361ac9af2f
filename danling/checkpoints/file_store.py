"""Checkpoints that are single files, each with its checksums beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from . import storage
from .archive import archive_complaints
from .errors import CheckpointDamaged
from .manifest import Manifest, damage_of, damaged, find_problems
from .manifest import read_manifest as read_sums
from .policy import Record, is_name
from .store import CheckpointStore

SUFFIX = ".pth"
SUMS = ".sha256"
NEXT = ".sha256.next"
DELETING = ".deleting-"
"""Prefix of a mark that a checkpoint of that name is being deleted: it lies there until the last of its files is gone."""


class FileStore(CheckpointStore):
    """`{name}.pth` with `{name}.pth.sha256`.

    A file and its checksums cannot change at one instant. The new checksums wait in `{name}.pth.sha256.next` while the file is replaced, so
    that at every instant one of the two describes the file that is there.
    """

    suffix: ClassVar[str] = SUFFIX
    """What names of files end with; another kind of single files has another one."""

    def path(self, name: str) -> Path:
        """Return `{name}.pth`."""
        return self.directory / f"{name}{self.suffix}"

    def locate(self, source: Path) -> Path | None:
        """Return the file itself, or `latest.pth` in a checkpoint or run directory."""
        for candidate in (
            source,
            source / f"latest{self.suffix}",
            source / self.directory.name / f"latest{self.suffix}",
        ):
            # A bare name is a pointer to a sharded checkpoint.
            if not is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return None

    def write(self, write: Callable[[storage.HashingWriter], object], records: Sequence[Record]) -> None:
        """Write one file durably and publish it under the names of the records, which come in the order they become visible."""
        self._settle_all()
        for record in records:
            self._make_way(self.path(record.name))
        staged = storage.staged_name(self.directory)
        size, digest = storage.write_file(staged, write)
        try:
            for record in records:
                path = self.path(record.name)
                manifest = Manifest(record, {path.name: (size, digest)})
                storage.replace_text(_beside(path, NEXT), manifest.text())
            storage.sync_directory(self.directory)
            for record in records:
                storage.link(staged, self.path(record.name))
            storage.sync_directory(self.directory)
            for record in records:
                path = self.path(record.name)
                storage.replace(_beside(path, NEXT), _beside(path, SUMS))
            storage.sync_directory(self.directory)
        finally:
            storage.discard(staged)

    def _make_way(self, path: Path) -> None:
        # A deletion that failed half-way must not be finished on what takes the name now.
        storage.remove(self.directory / f"{DELETING}{path.name.removesuffix(self.suffix)}")
        for part in (path, _beside(path, NEXT), _beside(path, SUMS)):
            self.moved(part, storage.make_way(part))
        bare = all(storage.absence(_beside(path, suffix)) == storage.MISSING for suffix in (SUMS, NEXT))
        if bare and storage.absence(path) == storage.IS_FILE:
            # No save leaves a file like that, not even one that was killed: it is somebody's.
            self.moved(path, storage.set_aside(path))

    def recover(self) -> None:
        """Remove unfinished files, and bring to an end every change of names and every deletion that was interrupted."""
        storage.clean(self.directory)
        for name in sorted(storage.names(self.directory)):
            if name.startswith(DELETING):
                self.delete(name.removeprefix(DELETING))
        self._settle_all()

    def _settle_all(self) -> None:
        for name in sorted(storage.names(self.directory)):
            if name.endswith(f"{self.suffix}{NEXT}"):
                self._settle(self.directory / name.removesuffix(NEXT))

    def _settle(self, path: Path) -> None:
        waiting = _beside(path, NEXT)
        if storage.size_of(waiting) is None:
            return
        if not _compared(path, waiting, "full")[1]:
            self.moved(_beside(path, SUMS), storage.make_way(_beside(path, SUMS)))
            storage.replace(waiting, _beside(path, SUMS))
        elif storage.absence(path) == storage.MISSING or not _compared(path, _beside(path, SUMS), "full")[1]:
            storage.remove(waiting)
        # Else the file cannot be read now, or fits neither: what describes it is kept.

    def records(self, *, complete: bool) -> list[Record]:
        """Return what the manifests record, oldest first."""
        present = storage.names(self.directory)
        found = [self._recorded(path, complete) for path in self._named(present, (SUMS,))]
        return sorted((r for r in found if r is not None), key=lambda record: (record.sequence, record.name))

    def _named(self, present: set[str], suffixes: Sequence[str]) -> list[Path]:
        """Return the files and those of which only checksums are left, sorted."""
        files = {name for name in present if name.endswith(self.suffix)}
        described = {
            name.removesuffix(suffix)
            for suffix in suffixes
            for name in present
            if name.endswith(f"{self.suffix}{suffix}")
        }
        # A pipe or a directory under a name that the library never gives is no checkpoint, and not worth a word at every restart.
        others = {name for name in files - described if not is_name(name.removesuffix(self.suffix))}
        strange = {name for name in others if storage.is_no_file(self.directory / name)}
        return [self.directory / name for name in sorted((files | described) - strange)]

    def _recorded(self, path: Path, complete: bool) -> Record | None:
        try:
            return read_manifest(path, "size").record
        except CheckpointDamaged as error:
            self.pass_over(path, error)
        try:
            return None if complete else self.record(path)
        except CheckpointDamaged:
            return None

    def record(self, path: Path) -> Record:
        """Return what the manifest beside a file records."""
        if storage.size_of(_beside(path, NEXT)) is not None:
            return read_manifest(path, "full").record
        try:
            return _parsed(path, _beside(path, SUMS)).record
        except CheckpointDamaged as error:
            raise damage_of(path, error) from error

    def verify(self, path: Path, level: str) -> None:
        """Compare a file with its checksums; one that was copied without them, with those inside of it. Level `"none"` needs none.

        In the directory of a run missing checksums are damage: nothing else tells whether a file there is the one of its name.
        """
        if level == "none":
            return
        if has_sums(path):
            read_manifest(path, level)
        elif self.owns(path) or is_of_run(path.parent):
            raise missing_sums(path)
        else:
            verify_alone(path, level)

    def claims(self, path: Path) -> bool:
        """Whether a path ends as a file does."""
        return path.suffix == self.suffix

    def listed(self) -> list[Path]:
        """Return every file, and every file of which only the checksums are left."""
        present = storage.names(self.directory) if self.directory.is_dir() else set()
        return self._named(present, (SUMS, NEXT))

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        """Return the checksums beside a file, and how it differs from them."""
        if storage.size_of(_beside(path, NEXT)) is not None:
            # A save was killed between the file and its checksums: either of the two may be the one that fits.
            return read_manifest(path, level), []
        sums = _beside(path, SUMS)
        manifest = read_sums(sums, sums.name)
        if set(manifest.files) != {path.name}:
            return manifest, [f"{sums.name} describes {', '.join(sorted(manifest.files))} instead of {path.name}"]
        return manifest, find_problems(manifest, path.parent, level)

    def lacks_sums(self, path: Path) -> bool:
        """Whether a checkpoint was copied without its checksums."""
        return not has_sums(path)

    def delete(self, name: str) -> None:
        """Remove a file and its checksums, under a mark that lets whoever comes after a kill finish it."""
        mark = self.directory / f"{DELETING}{name}"
        storage.write_new_text(mark, "")
        # Sums last: a file that lost them alone would lie there for ever, neither a checkpoint nor removed by retention.
        storage.remove(self.path(name))
        storage.remove(_beside(self.path(name), NEXT))
        storage.remove(_beside(self.path(name), SUMS))
        storage.remove(mark)

    def sweep(self, protected: set[int]) -> None:
        """Nothing: a file that has no name is gone."""


def has_sums(path: Path) -> bool:
    """Whether checksums lie beside a file."""
    return any(storage.size_of(_beside(path, suffix)) is not None for suffix in (SUMS, NEXT))


def is_of_run(directory: Path) -> bool:
    """Whether files in a directory are checkpoints of a run, and no copies: others have checksums, or the run's description is near."""
    if storage.size_of(directory.parent / "metadata" / "config.full.yaml") is not None:
        return True
    return any(name.endswith((SUMS, NEXT)) for name in storage.names(directory))


def missing_sums(path: Path) -> CheckpointDamaged:
    """Return the error for a file in the directory of a run that has no checksums."""
    return CheckpointDamaged(
        f"Expected a checkpoint with its checksums beside it. Received: {path}; {path.name}{SUMS} is missing, which in the directory of "
        "a run is damage. Use another checkpoint; or, if you put the file there, move it to a directory of its own, where it is verified "
        "by the checksums inside of it."
    )


def verify_alone(path: Path, level: str, *, required: bool = True) -> None:
    """Compare a file with the checksums inside of it."""
    problems = [] if level == "none" else archive_complaints(path, tensors=level == "full", required=required)
    if problems:
        raise CheckpointDamaged(
            f"Expected {path} as it was written. Received: {'; '.join(problems[:5])}. Copy it again, with {path.name}{SUMS} beside it."
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"


def read_manifest(path: Path, level: str) -> Manifest:
    """Return the manifest that describes a checkpoint file as it is now."""
    waiting = storage.size_of(_beside(path, NEXT)) is not None
    # What lies there says more than that it has no checksums.
    problems = [f"{path.name} {storage.absence(path)}"] if storage.is_no_file(path) else []
    for suffix in (SUMS, NEXT) if waiting else (SUMS,):
        # A save was killed between file and checksums: only the contents tell which of the two the file is described by.
        manifest, found = _compared(path, _beside(path, suffix), "full" if waiting else level)
        if manifest is not None and not found:
            return manifest
        problems += found
    raise damaged(problems, path)


def _compared(path: Path, sums: Path, level: str) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = _parsed(path, sums)
    except CheckpointDamaged as error:
        return None, [str(error)]
    return manifest, find_problems(manifest, path.parent, level)


def _parsed(path: Path, sums: Path) -> Manifest:
    manifest = read_sums(sums, sums.name)
    if set(manifest.files) != {path.name} or f"{manifest.record.name}{path.suffix}" != path.name:
        described = sorted({*manifest.files, f"{manifest.record.name}{path.suffix}"} - {path.name})
        raise CheckpointDamaged(f"{sums.name} describes {', '.join(described) or 'nothing'} instead of {path.name}")
    return manifest
