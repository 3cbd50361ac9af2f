"""How checkpoints are arranged in a directory: single files with their checksums, or target directories with pointers to them.

Everything here runs on rank 0, and needs no torch.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from danling.utils.files import refuse_link

from . import storage
from .errors import CheckpointDamaged, reason
from .manifest import (
    Line,
    Manifest,
    Record,
    archive_complaints,
    damaged,
    find_problems,
    history_name,
    is_history,
    is_name,
    on_line,
    read_manifest,
    to_delete,
)

logger = logging.getLogger("danling")

SUFFIX = ".pth"
FILE_SUMS = ".sha256"
"""Suffix of the manifest of a file."""
NEXT = ".sha256.next"
DELETING = ".deleting-"
"""Prefix of a mark that a checkpoint of that name is being deleted. It is removed after the last of its files."""
TARGETS = "targets"
SUMS = "manifest.sha256"
"""The manifest of a target."""
RUNNER_FILE = "runner.pth"
"""In a target of a DeepSpeed engine: everything but model and optimizer, for `torch.load(weights_only=True)`."""

_TARGET = re.compile(r"\d{8,}-[0-9a-f]{8}")
_POINTER_BYTES = 64


class CheckpointStore(ABC):
    """The checkpoints of one run in one directory."""

    is_elsewhere: ClassVar[bool] = False
    """Whether checkpoints are in another place than the directory, and are brought there by `verify`."""

    def __init__(self, directory: Path, *, run_id: str) -> None:
        self.is_part = False
        """Whether other machines have the rest of each checkpoint, so that none can be read here."""
        self.directory = directory
        self.run_id = run_id
        self._skipped: dict[Path | str, str] = {}

    @property
    def place(self) -> str:
        """Where these checkpoints are, for errors."""
        return str(self.directory)

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
        text = str(source)
        plain = "/" not in text and not text.startswith(".")
        return (self.locate(self.path(text)) if plain else None) or self.locate(Path(source))

    def target(self, path: Path) -> Path:
        """Return the file or directory that a checkpoint at `path` is read from."""
        return path

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint is in the directory of this store."""
        # pathlib raises where links lead to each other.
        return Path(os.path.realpath(self.directory)) in Path(os.path.realpath(path)).parents

    def is_used(self) -> bool:
        """Whether there may be something of this kind in the directory."""
        return True

    def claims(self, path: Path) -> bool:
        """Whether a path, which need not exist any more, is that of a checkpoint of this kind."""
        return False

    def listed(self) -> list[Path]:
        """Return every checkpoint in the directory, those of which only the checksums are left included."""
        return []

    @abstractmethod
    def records(self, *, complete: bool) -> list[Record]:
        """Return what manifests record, oldest first. Checkpoints with missing or cut files are logged."""

    @abstractmethod
    def record(self, path: Path) -> Record:
        """Return the record of the checkpoint at a path."""

    def describe(self, path: Path) -> Record | None:
        """Return the record of a checkpoint of this directory; `None` for one in another directory."""
        return self.record(path) if self.owns(path) else None

    # Verifying

    @abstractmethod
    def verify(self, path: Path, level: str) -> None:
        """Compare a checkpoint with its manifest, and raise `CheckpointDamaged` if it differs."""

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        """Return the manifest of a checkpoint, and every way in which its files differ from it."""
        raise NotImplementedError

    def lacks_sums(self, path: Path) -> bool:
        """Whether a checkpoint was copied without its checksums."""
        return False

    def bring(self, path: Path) -> None:
        """Make a checkpoint that was verified on rank 0 readable at its path by every process. Called on all ranks."""
        return

    def skip(self, path: Path | str, error: Exception) -> None:
        """Log, once for each reason, that a checkpoint does not count."""
        if self._skipped.get(path) != str(error):
            self._skipped[path] = str(error)
            logger.warning("%s is skipped: %s", path, error)

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
        return

    def litter(self) -> list[Path]:
        """Return the files that killed saves and deletions have left where no process writes."""
        return []

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def sweep(self, protected: set[int]) -> None:
        """Remove what no name leads to any more, except the saves with these sequences."""
        return

    def prune(self, line: Line, *, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Remove the history that retention gives up. What cannot be removed is tried again at the next save."""
        try:
            records = [r for r in self.records(complete=True) if on_line(r, line.branch, line.ancestors)]
        except OSError as error:
            logger.warning("Could not see which checkpoints in %s are old: %s", self.directory, error)
            return
        protected = {r.sequence for r in records if r.name in ("latest", "best")} | pending
        if resumed is not None:
            protected.add(resumed.sequence)
        for name in to_delete(records, keep=keep, protected=protected):
            self._try_to(partial(self.delete, name))
        self._try_to(partial(self.sweep, protected))

    def _try_to(self, remove: Callable[[], None]) -> None:
        try:
            remove()
        except OSError as error:
            logger.warning("An old checkpoint in %s is still there: %s", self.directory, error)

    def targets(self) -> set[str]:
        """Return the names of the targets in the directory."""
        return set()

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        """Remove this machine's part of older targets that the main process has removed."""
        return

    def _log_moved(self, path: Path, aside: Path | None) -> None:
        if aside is not None:
            logger.warning("%s was in the way of a checkpoint and is no part of one. It is at %s now.", path, aside)


# Single files


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

    def write(self, write: Callable[[storage.HashingWriter], object], records: Sequence[Record]) -> None:
        """Write one file durably and publish it under the names of the records, in their order."""
        self._settle_all()
        paths = [self.path(record.name) for record in records]
        for path in paths:
            self._make_way(path)
        staged = storage.staged_name(self.directory)
        written = storage.write_file(staged, write)
        try:
            for path, record in zip(paths, records):
                storage.replace_text(_beside(path, NEXT), Manifest(record, {path.name: written}).text())
            storage.sync_directory(self.directory)
            for path in paths:
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
            self._log_moved(part, storage.make_way(part))
        bare = all(storage.absence(_beside(path, suffix)) == storage.MISSING for suffix in (FILE_SUMS, NEXT))
        if bare and storage.absence(path) == storage.IS_FILE:
            # No save leaves a file like that, not even a killed one: a user has put it there.
            self._log_moved(path, storage.set_aside(path))

    def recover(self) -> None:
        storage.clean(self.directory)
        for name in sorted(storage.names(self.directory)):
            if name.startswith(DELETING):
                self.delete(name.removeprefix(DELETING))
        self._settle_all()

    def _settle_all(self) -> None:
        for name in sorted(storage.names(self.directory)):
            if name.endswith(f"{SUFFIX}{NEXT}"):
                self._settle(self.directory / name.removesuffix(NEXT))

    def _settle(self, path: Path) -> None:
        waiting, sums = _beside(path, NEXT), _beside(path, FILE_SUMS)
        if storage.size_of(waiting) is None:
            return
        if not _compare(path, waiting, "full")[1]:
            self._log_moved(sums, storage.make_way(sums))
            storage.replace(waiting, sums)
        elif storage.absence(path) == storage.MISSING or not _compare(path, sums, "full")[1]:
            storage.remove(waiting)
        # Else the file cannot be read now, or fits neither: what describes it is kept.

    def litter(self) -> list[Path]:
        names = storage.names(self.directory)
        marked = {name.removeprefix(DELETING) for name in names if name.startswith(DELETING)}
        orphans = {f"{name}{SUFFIX}{FILE_SUMS}" for name in marked if f"{name}{SUFFIX}" not in names}
        left = [name for name in names if name.startswith((storage.STAGED, DELETING)) or name in orphans]
        return [self.directory / name for name in left]

    def records(self, *, complete: bool) -> list[Record]:
        present = storage.names(self.directory)
        found = [self._recorded(path, complete) for path in self._named(present, (FILE_SUMS,))]
        return sorted((r for r in found if r is not None), key=lambda record: (record.sequence, record.name))

    def _named(self, present: set[str], suffixes: Sequence[str]) -> list[Path]:
        """Return the files and those of which only checksums are left, sorted."""
        files = {name for name in present if name.endswith(SUFFIX)}
        described = {
            name.removesuffix(suffix) for suffix in suffixes for name in present if name.endswith(f"{SUFFIX}{suffix}")
        }
        # A pipe or a directory under a name that the library never gives is no checkpoint, and not worth a word at every restart.
        others = {name for name in files - described if not is_name(name.removesuffix(SUFFIX))}
        strange = {name for name in others if storage.is_no_file(self.directory / name)}
        return [self.directory / name for name in sorted((files | described) - strange)]

    def _recorded(self, path: Path, complete: bool) -> Record | None:
        try:
            return read_file_manifest(path, "size").record
        except CheckpointDamaged as error:
            self.skip(path, error)
        try:
            return None if complete else self.record(path)
        except CheckpointDamaged:
            return None

    def record(self, path: Path) -> Record:
        if storage.size_of(_beside(path, NEXT)) is not None:
            return read_file_manifest(path, "full").record
        try:
            return _parse(path, _beside(path, FILE_SUMS)).record
        except CheckpointDamaged as error:
            raise damaged([str(error)], path) from error

    def verify(self, path: Path, level: str) -> None:
        if level == "none":
            return
        if has_sums(path):
            read_file_manifest(path, level)
        elif self.owns(path) or is_of_run(path.parent):
            raise missing_sums(path)
        else:
            verify_alone(path, level)

    def claims(self, path: Path) -> bool:
        return path.suffix == SUFFIX

    def listed(self) -> list[Path]:
        return self._named(storage.names(self.directory) if self.directory.is_dir() else set(), (FILE_SUMS, NEXT))

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        if storage.size_of(_beside(path, NEXT)) is not None:
            # A save was killed between the file and its checksums: either of the two may fit.
            return read_file_manifest(path, level), []
        sums = _beside(path, FILE_SUMS)
        manifest = read_manifest(sums, sums.name)
        if set(manifest.files) != {path.name}:
            return manifest, [f"{sums.name} describes {', '.join(sorted(manifest.files))} instead of {path.name}"]
        return manifest, find_problems(manifest, path.parent, level)

    def lacks_sums(self, path: Path) -> bool:
        return not has_sums(path)

    def delete(self, name: str) -> None:
        mark, path = self.directory / f"{DELETING}{name}", self.path(name)
        storage.write_new_text(mark, "")
        # Sums last: a file that lost them alone would stay for ever, neither a checkpoint nor removed by retention.
        for part in (path, _beside(path, NEXT), _beside(path, FILE_SUMS), mark):
            storage.remove(part)


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
    problems = [] if level == "none" else archive_complaints(path, tensors=level == "full", required=required)
    if problems:
        raise CheckpointDamaged(
            f"Expected {path} as it was written. Received: {'; '.join(problems[:5])}. Copy it again, "
            f"with {path.name}{FILE_SUMS} next to it."
        )


def read_file_manifest(path: Path, level: str) -> Manifest:
    """Return the manifest that describes a checkpoint file as it is now."""
    waiting = storage.size_of(_beside(path, NEXT)) is not None
    # The kind of a path that is no file says more than its missing checksums.
    problems = [f"{path.name} {storage.absence(path)}"] if storage.is_no_file(path) else []
    for suffix in (FILE_SUMS, NEXT) if waiting else (FILE_SUMS,):
        # A save was killed between file and checksums: only the contents tell which of the two describes the file.
        manifest, found = _compare(path, _beside(path, suffix), "full" if waiting else level)
        if manifest is not None and not found:
            return manifest
        problems += found
    raise damaged(problems, path)


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"


def _compare(path: Path, sums: Path, level: str) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = _parse(path, sums)
    except CheckpointDamaged as error:
        return None, [str(error)]
    return manifest, find_problems(manifest, path.parent, level)


def _parse(path: Path, sums: Path) -> Manifest:
    manifest = read_manifest(sums, sums.name)
    named = f"{manifest.record.name}{path.suffix}"
    if set(manifest.files) != {path.name} or named != path.name:
        described = sorted({*manifest.files, named} - {path.name})
        raise CheckpointDamaged(f"{sums.name} describes {', '.join(described) or 'nothing'} instead of {path.name}")
    return manifest


# Targets


class TargetStore(CheckpointStore):
    """`targets/{sequence}-{random}/`, written once and never changed, and pointer files `latest`, `best`, `ckpt-*`, `model`.

    A pointer holds the name of a target and nothing else. A target counts when it has its manifest, which is written last.
    """

    def path(self, name: str) -> Path:
        return self.directory / TARGETS / name if is_target(name) else self.directory / name

    def new_target(self, sequence: int) -> str:
        """Return a name that no attempt ever had."""
        return f"{sequence:08d}-{uuid.uuid4().hex[:8]}"

    def give_up(self, target: str) -> None:
        """Remove a target that could not be finished; when that fails as well, the next process that saves does it."""
        try:
            storage.remove_tree(self.path(target))
        except OSError as error:
            logger.warning("Could not remove the unfinished %s: %s", self.path(target), error)

    def publish(self, target: str, names: Sequence[str]) -> None:
        """Let names lead to a complete target, in the order given. Here a save into a directory becomes visible."""
        for name in names:
            self._log_moved(self.directory / name, storage.make_way(self.directory / name))
            storage.write_text(self.directory / name, f"{target}\n")

    def locate(self, source: Path) -> Path | None:
        for candidate in (source, source / "latest", source / self.directory.name / "latest"):
            if is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return source if storage.size_of(source / SUMS) is not None else None

    def target(self, path: Path) -> Path:
        if os.path.isdir(path) and not is_name(path.name):
            return path
        name = self._pointed(path)
        if not is_target(name):
            raise CheckpointDamaged(
                f"Expected {path} to hold the name of a target, such as 00000012-1a2b3c4d. Received: {name[:80]!r}. Use another checkpoint."
            )
        target = path.parent / TARGETS / name
        if not os.path.isdir(target):
            raise CheckpointDamaged(
                f"Expected {path} to lead to a target. Received: {TARGETS}/{name}, which {storage.absence(target)}. Use another checkpoint."
            )
        return target

    def _pointed(self, path: Path) -> str:
        try:
            size = storage.size_of(path)
            if size is None:
                raise damaged([f"{path.name} {storage.absence(path)}"], path)
            return storage.read_text(path).removesuffix("\n") if size <= _POINTER_BYTES else f"{size} bytes"
        except OSError as error:
            raise damaged([f"{path.name} cannot be read: {reason(error)}"], path) from error

    def is_used(self) -> bool:
        return (self.directory / TARGETS).is_dir()

    def recover(self) -> None:
        targets = self.directory / TARGETS
        refuse_link(targets)
        if not os.path.isdir(targets):
            self._log_moved(targets, storage.set_aside(targets) if os.path.lexists(targets) else None)
        storage.make_directory(targets)
        storage.clean(self.directory)
        for path in self.litter():
            if path.parent == targets:
                self.give_up(path.name)

    def litter(self) -> list[Path]:
        left = [self.directory / name for name in storage.names(self.directory) if name.startswith(storage.STAGED)]
        targets = self.directory / TARGETS
        names = storage.names(targets) if os.path.isdir(targets) else ()
        return left + [targets / name for name in names if is_target(name) and _is_unfinished(targets / name)]

    def records(self, *, complete: bool) -> list[Record]:
        found: list[Record] = []
        led_to = set()
        for name in sorted(filter(is_name, storage.names(self.directory))):
            record = self._recorded(self.directory / name, complete)
            if record is not None:
                led_to.add(record.name)
                found.append(replace(record, name=name))
        for name in sorted(self.targets() - led_to):
            if is_target(name) and not _is_unfinished(self.path(name)):
                record = self._recorded(self.path(name), complete)
                found += [record] if record is not None else []
        return sorted(found, key=lambda record: (record.sequence, record.name))

    def targets(self) -> set[str]:
        try:
            return storage.names(self.directory / TARGETS)
        except OSError as error:
            # The other kind of checkpoints in the same directory may be as good as ever.
            self.skip(self.directory / TARGETS, error)
            return set()

    def _recorded(self, path: Path, complete: bool) -> Record | None:
        try:
            target = self.target(path)
            manifest = _manifest_of(target)
        except CheckpointDamaged as error:
            self.skip(path, error)
            return None
        if self.is_part:
            here = storage.names(target)
            manifest = replace(manifest, files={name: of for name, of in manifest.files.items() if name in here})
        problems = find_problems(manifest, target, "size")
        if problems:
            self.skip(path, damaged(problems, path))
        return None if complete and problems else manifest.record

    def record(self, path: Path) -> Record:
        target = self.target(path)
        try:
            return _manifest_of(target).record
        except CheckpointDamaged as error:
            raise damaged([str(error)], path) from error

    def claims(self, path: Path) -> bool:
        return is_name(path.name) or is_target(path.name) or storage.size_of(path / SUMS) is not None

    def listed(self) -> list[Path]:
        if not self.is_used():
            return []
        pointers = sorted(filter(is_name, storage.names(self.directory)))
        led_to = set()
        for name in pointers:
            with suppress(CheckpointDamaged):  # `examine` says why
                led_to.add(self.target(self.directory / name).name)
        targets = [self.path(name) for name in sorted(filter(is_target, self.targets() - led_to))]
        return [*(self.directory / name for name in pointers), *(path for path in targets if (path / SUMS).is_file())]

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        target = self.target(path)
        manifest = read_manifest(target / SUMS, f"{target.name}/{SUMS}")
        problems = find_problems(manifest, target, level)
        if manifest.record.name != target.name:
            problems.append(f"{target.name}/{SUMS} describes {manifest.record.name} instead of {target.name}")
        extra = sorted(storage.names(target) - manifest.files.keys() - {SUMS})
        return manifest, problems + misled(path, manifest.record) + [f"{name} is not part of it" for name in extra]

    def verify(self, path: Path, level: str) -> None:
        target = self.target(path)
        if level == "none":
            return
        try:
            problems = self.examine(path, level)[1]
        except CheckpointDamaged as error:
            raise damaged([str(error)], path) from error
        if problems:
            raise damaged(problems, target)

    def delete(self, name: str) -> None:
        storage.remove(self.directory / name)

    def sweep(self, protected: set[int]) -> None:
        for record in self.records(complete=False):
            unused = is_target(record.name) and record.sequence not in protected
            if unused and not os.path.islink(self.path(record.name)):
                # The manifest first: without it the target does not count, whatever else is left when this is interrupted.
                storage.remove(self.path(record.name) / SUMS)
                storage.remove_tree(self.path(record.name))

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        for name in sorted(self.targets() - {*kept}):
            older = is_target(name) and int(name.partition("-")[0]) < sequence
            if older and not os.path.islink(self.path(name)):
                self._try_to(partial(storage.remove_tree, self.path(name)))


def is_target(name: str) -> bool:
    return _TARGET.fullmatch(name) is not None


def is_engine_target(target: Path) -> bool:
    """Whether a target was written by the DeepSpeed manager."""
    return storage.size_of(target / RUNNER_FILE) is not None


def misled(pointer: Path, record: Record) -> list[str]:
    """Return the defects of a pointer to a checkpoint of another step or epoch than its name says; empty when nothing is."""
    fitting = [history_name(step_mode=mode, epoch=record.epoch, global_step=record.step) for mode in (True, False)]
    if not is_history(pointer.name) or pointer.name in fitting:
        return []
    return [f"{pointer.name} leads to the checkpoint of step {record.step}, epoch {record.epoch}"]


def _is_unfinished(target: Path) -> bool:
    """Whether a target is what a killed save leaves: a directory without a manifest, which is written last."""
    return os.path.isdir(target) and not os.path.islink(target) and storage.absence(target / SUMS) == storage.MISSING


def _manifest_of(target: Path) -> Manifest:
    manifest = read_manifest(target / SUMS, f"{target.name}/{SUMS}")
    if manifest.record.name != target.name:
        raise CheckpointDamaged(f"{target.name}/{SUMS} describes {manifest.record.name} instead of {target.name}")
    return manifest
