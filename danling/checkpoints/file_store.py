"""How a checkpoint of one file is published together with its checksums, and verified where it has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import storage
from .checkpoint_store import SUFFIX, CheckpointStore
from .errors import CheckpointDamaged
from .manifest import (
    Manifest,
    Record,
    archive_complaints,
    damaged,
    find_problems,
    is_name,
    read_manifest,
)

FILE_SUMS = ".sha256"
"""Suffix of the manifest of a file."""
NEXT = ".sha256.next"
DELETING = ".deleting-"
"""Prefix of a mark that a checkpoint of that name is being deleted. It is removed after the last of its files."""


class FileStore(CheckpointStore):
    """`{name}.pth` with `{name}.pth.sha256`.

    A file and its checksums cannot change at one instant. The new checksums wait in `{name}.pth.sha256.next` while the file is replaced, so
    that at every instant one of the two describes the file.
    """

    def path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"

    def locate(self, source: Path) -> Path | None:
        latest = f"latest{SUFFIX}"
        for candidate in (source, source / latest, source / self.directory.name / latest):
            # A bare name is a pointer to a sharded checkpoint.
            if not is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return None

    @contextmanager
    def publishing(self, records: Sequence[Record]) -> Iterator[storage.HashingWriter]:
        """Open a new file to write. When the context ends, it is durable, and has the names of the records, in their order."""
        # Before new checksums wait: those of a killed save would be replaced, and its file have none.
        self._settle()
        paths = [self.path(record.name) for record in records]
        for path in paths:
            self._make_way(path)
        staged = storage.staged_name(self.directory)
        with storage.open_new(staged) as writer:
            yield writer
        written = writer.size, writer.sha256
        try:
            # Each sync is a barrier: after a power cut, a later rename is never on the disk without the earlier ones.
            for path, record in zip(paths, records):
                storage.replace_text(
                    _beside(path, NEXT), Manifest(record, {path.name: written}).text()
                )
            storage.sync_directory(self.directory)
            for path in paths:
                # The names of one save are links to one file: it is written once.
                storage.link(staged, path)
            storage.sync_directory(self.directory)
            for path in paths:
                storage.replace(_beside(path, NEXT), _beside(path, FILE_SUMS))
            storage.sync_directory(self.directory)
        finally:
            storage.discard(staged)

    def _make_way(self, path: Path) -> None:
        # A deletion that failed half-way must not be finished on what takes the name now.
        storage.remove(self.directory / f"{DELETING}{path.name.removesuffix(SUFFIX)}")
        for part in (path, _beside(path, NEXT), _beside(path, FILE_SUMS)):
            storage.make_way(part)
        bare = all(
            storage.absence(_beside(path, suffix)) == storage.MISSING
            for suffix in (FILE_SUMS, NEXT)
        )
        if bare and storage.absence(path) == storage.IS_FILE:
            # No save leaves a file like that, not even a killed one: a user has put it there.
            storage.set_aside(path)

    def recover(self) -> None:
        storage.clean(self.directory)
        # Deletions first: what they remove need not be hashed.
        for name in sorted(storage.names(self.directory)):
            if name.startswith(DELETING):
                self.delete(name.removeprefix(DELETING))
        self._settle()

    def _settle(self) -> None:
        """Let each file that was being replaced have the checksums that describe it."""
        for name in sorted(storage.names(self.directory)):
            path = self.directory / name.removesuffix(NEXT)
            waiting, sums = _beside(path, NEXT), _beside(path, FILE_SUMS)
            if not name.endswith(f"{SUFFIX}{NEXT}") or storage.size_of(waiting) is None:
                continue
            # By content: sizes of two saves of one model are often equal.
            if not _compare(path, NEXT, "full")[1]:
                storage.make_way(sums)
                storage.replace(waiting, sums)
            elif (
                storage.absence(path) == storage.MISSING or not _compare(path, FILE_SUMS, "full")[1]
            ):
                storage.remove(waiting)
            # Else the file cannot be read now, or fits neither: what describes it is kept.

    def litter(self) -> list[Path]:
        names = storage.names(self.directory)
        # Of a deletion that was interrupted: the mark, and checksums whose file is gone.
        marked = {
            f"{name.removeprefix(DELETING)}{SUFFIX}" for name in names if name.startswith(DELETING)
        }
        left = {name for name in names if name.startswith((storage.STAGED, DELETING))}
        left |= {f"{file}{FILE_SUMS}" for file in marked - names} & names
        # Of a save that was killed before its file had the name for the first time.
        waiting = {name.removesuffix(NEXT) for name in names if name.endswith(f"{SUFFIX}{NEXT}")}
        left |= {f"{file}{NEXT}" for file in waiting - names if f"{file}{FILE_SUMS}" not in names}
        return [self.directory / name for name in left]

    def listed(self) -> list[Path]:
        names = storage.names(self.directory)
        files = {name for name in names if name.endswith(SUFFIX)}
        described = {
            name.removesuffix(FILE_SUMS) for name in names if name.endswith(f"{SUFFIX}{FILE_SUMS}")
        }
        # A pipe or a directory under a name that the library never gives is no checkpoint, and not worth a word at every restart.
        others = {name for name in files - described if not is_name(name.removesuffix(SUFFIX))}
        strange = {name for name in others if storage.is_no_file(self.directory / name)}
        return [self.directory / name for name in sorted((files | described) - strange)]

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        # The kind of a path that is no file says more than its missing checksums.
        problems = [f"{path.name} {storage.absence(path)}"] if storage.is_no_file(path) else []
        last = None
        suffixes = [FILE_SUMS]
        if storage.size_of(_beside(path, NEXT)) is not None:
            # A save was killed between file and checksums: only the contents tell which of the two
            # describes the file.
            suffixes, level = [FILE_SUMS, NEXT], "full"
        for suffix in suffixes:
            manifest, found = _compare(path, suffix, level)
            if manifest is not None and not found:
                return manifest, []
            last = manifest or last
            problems += found
        if last is None:
            raise damaged(problems, path)
        return last, problems

    def verify(self, path: Path, level: str) -> None:
        if level == "none" or has_sums(path):
            super().verify(path, level)
        elif self.owns(path) or is_of_run(path.parent):
            raise missing_sums(path)
        else:
            verify_alone(path, level)

    def delete(self, name: str) -> None:
        mark, path = self.directory / f"{DELETING}{name}", self.path(name)
        with storage.opened(self.directory, self._pinned) as here:
            storage.write_mark(mark, within=here)
            # Sums last: a file that lost them alone would stay for ever, neither a checkpoint nor removed by retention.
            for part in (path, _beside(path, NEXT), _beside(path, FILE_SUMS), mark):
                storage.remove(part, within=here)


def has_sums(path: Path) -> bool:
    """Whether a file has its checksums."""
    return any(storage.size_of(_beside(path, suffix)) is not None for suffix in (FILE_SUMS, NEXT))


def is_of_run(directory: Path) -> bool:
    """Whether files in a directory are checkpoints of a run, and no copies: others have checksums, or the run's description is near."""
    if storage.size_of(directory.parent / "metadata" / "config.full.yaml") is not None:
        return True
    return any(name.endswith((FILE_SUMS, NEXT)) for name in storage.names(directory))


def missing_sums(path: Path) -> CheckpointDamaged:
    """Return the error for a file in the directory of a run that has no checksums."""
    return CheckpointDamaged(
        f"Expected a checkpoint with its checksums next to it. Received: {path}; {path.name}{FILE_SUMS} is missing, which in the directory "
        "of a run is damage. Use another checkpoint; or, if you put the file there, move it to its own directory, where it is "
        "verified by the checksums inside of it."
    )


def verify_alone(path: Path, level: str, *, required: bool = True) -> None:
    """Compare a file with the checksums inside of it."""
    if level == "none":
        return
    problems = archive_complaints(path, tensors=level == "full", required=required)
    if problems:
        raise CheckpointDamaged(
            f"Expected {path} as it was written. Received: {'; '.join(problems[:5])}. Copy it again, "
            f"with {path.name}{FILE_SUMS} next to it."
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"


def _compare(path: Path, suffix: str, level: str) -> tuple[Manifest | None, list[str]]:
    """Return the manifest next to a file, if it is one of this file, and how the file differs from it."""
    sums = _beside(path, suffix)
    try:
        manifest = read_manifest(sums, sums.name)
    except CheckpointDamaged as error:
        return None, [str(error)]
    # A manifest that was copied to another name must not make a checkpoint of that name.
    described = {*manifest.files, f"{manifest.record.name}{path.suffix}"}
    if described != {path.name} or not manifest.files:
        others = ", ".join(sorted(described - {path.name})) or "nothing"
        return None, [f"{sums.name} describes {others} instead of {path.name}"]
    return manifest, find_problems(manifest, path.parent, level)
