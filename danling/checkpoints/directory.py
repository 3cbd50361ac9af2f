"""The directory of a run's checkpoints: how saves are published, found, listed, verified and removed.

`FileStore` and `TargetStore` are the two ways in which checkpoints are arranged on the disk, `CheckpointDirectory` is all that a run has.
Everything here runs on rank 0, communicates nothing and needs no torch.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from danling.utils.files import refuse_link

from . import storage
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, reason
from .manifest import (
    Branch,
    Manifest,
    Record,
    archive_complaints,
    damaged,
    find_problems,
    history_name,
    is_history,
    is_name,
    is_on_branch,
    newest,
    next_branch,
    read_manifest,
    to_delete,
)

if TYPE_CHECKING:
    from .manager import CheckpointSettings

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
_NAMED = 4
"""So many checkpoints are named in an error."""


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

    def prune(self, *, run: str, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Remove the history of a run that retention gives up. What cannot be removed is tried again at the next save."""
        try:
            # Those of an abandoned branch count too: else they would stay for ever.
            records = [record for record in self.records(complete=True) if record.run == run]
        except OSError as error:
            logger.warning("Could not see which checkpoints in %s are old: %s", self.directory, error)
            return
        protected = {record.sequence for record in records if record.name in ("latest", "best")} | pending
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
        # Before new checksums wait: those of a killed save would be replaced, and its file have none.
        self._settle()
        paths = [self.path(record.name) for record in records]
        for path in paths:
            self._make_way(path)
        staged = storage.staged_name(self.directory)
        written = storage.write_file(staged, write)
        try:
            # Each sync is a barrier: after a power cut, a later rename is never on the disk without the earlier ones.
            for path, record in zip(paths, records):
                storage.replace_text(_beside(path, NEXT), Manifest(record, {path.name: written}).text())
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
        bare = all(storage.absence(_beside(path, suffix)) == storage.MISSING for suffix in (FILE_SUMS, NEXT))
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
            elif storage.absence(path) == storage.MISSING or not _compare(path, FILE_SUMS, "full")[1]:
                storage.remove(waiting)
            # Else the file cannot be read now, or fits neither: what describes it is kept.

    def litter(self) -> list[Path]:
        names = storage.names(self.directory)
        marked = {f"{name.removeprefix(DELETING)}{SUFFIX}" for name in names if name.startswith(DELETING)}
        left = {name for name in names if name.startswith((storage.STAGED, DELETING))}
        left |= {f"{file}{FILE_SUMS}" for file in marked - names} & names
        # Of a save that was killed before its file had the name for the first time.
        waiting = {name.removesuffix(NEXT) for name in names if name.endswith(f"{SUFFIX}{NEXT}")}
        left |= {f"{file}{NEXT}" for file in waiting - names if f"{file}{FILE_SUMS}" not in names}
        return [self.directory / name for name in left]

    def listed(self) -> list[Path]:
        names = storage.names(self.directory)
        files = {name for name in names if name.endswith(SUFFIX)}
        described = {name.removesuffix(FILE_SUMS) for name in names if name.endswith(f"{SUFFIX}{FILE_SUMS}")}
        # A pipe or a directory under a name that the library never gives is no checkpoint, and not worth a word at every restart.
        others = {name for name in files - described if not is_name(name.removesuffix(SUFFIX))}
        strange = {name for name in others if storage.is_no_file(self.directory / name)}
        return [self.directory / name for name in sorted((files | described) - strange)]

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        # The kind of a path that is no file says more than its missing checksums.
        problems = [f"{path.name} {storage.absence(path)}"] if storage.is_no_file(path) else []
        last = None
        # A save was killed between file and checksums: only the contents tell which of the two describes the file.
        waiting = storage.size_of(_beside(path, NEXT)) is not None
        suffixes = (FILE_SUMS, NEXT) if waiting else (FILE_SUMS,)
        for suffix in suffixes:
            manifest, found = _compare(path, suffix, "full" if waiting else level)
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


def advice_about(path: Path) -> str:
    """Return how to read a directory that another program has written; an empty text if it is none that is known."""
    if (path / ".metadata").is_file():
        return (
            f" It is a directory of torch.distributed.checkpoint of another program: convert it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pth`, which runs what is pickled in it, and name "
            "weights.pth."
        )
    bare = sorted(file.name for file in path.glob("*.bin")) if path.is_dir() else []
    if len(bare) == 1:
        return f" Name the file in it: {path / bare[0]}."
    if bare:
        return f" It has weights in {len(bare)} files of torch.save: write them as safetensors, with `model.save_pretrained`."
    return ""


def verify_alone(path: Path, level: str, *, required: bool = True) -> None:
    """Compare a file with the checksums inside of it."""
    problems = [] if level == "none" else archive_complaints(path, tensors=level == "full", required=required)
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
    described = {*manifest.files, f"{manifest.record.name}{path.suffix}"}
    if described != {path.name} or not manifest.files:
        others = ", ".join(sorted(described - {path.name})) or "nothing"
        return None, [f"{sums.name} describes {others} instead of {path.name}"]
    return manifest, find_problems(manifest, path.parent, level)


# Targets


class TargetStore(CheckpointStore):
    """`targets/{sequence}-{random}/`, written once and never changed, and pointer files `latest`, `best`, `ckpt-*`, `model`.

    A pointer holds the name of a target and nothing else. A target counts when it has its manifest, which is written last.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pinned_targets: storage.Pinned | None = None

    def path(self, name: str) -> Path:
        return self.directory / TARGETS / name if is_target(name) else self.directory / name

    def give_up(self, target: str) -> None:
        """Remove a target that could not be finished; when that fails as well, the next process that saves does it."""
        try:
            with self._opened_targets() as targets:
                storage.remove_tree(self.path(target), within=targets)
        except OSError as error:
            logger.warning("Could not remove the unfinished %s: %s", self.path(target), error)

    def pin(self) -> None:
        super().pin()
        self._pinned_targets = storage.Pinned(self.directory / TARGETS)

    def refuse_links(self) -> None:
        refuse_link(self.directory / TARGETS)

    @contextmanager
    def _opened_targets(self) -> Iterator[int]:
        """Open the directory of the targets to remove some; a link, or another directory than this run has saved in, is refused."""
        path = self.directory / TARGETS
        with (
            storage.opened(self.directory, self._pinned) as here,
            storage.opened(path, self._pinned_targets, within=here) as targets,
        ):
            yield targets

    def publish(self, target: str, names: Sequence[str]) -> None:
        """Let names lead to a complete target, in the order given. Here a save into a directory becomes visible."""
        for name in names:
            storage.make_way(self.directory / name)
            storage.write_text(self.directory / name, f"{target}\n")

    def locate(self, source: Path) -> Path | None:
        for candidate in (source, source / "latest", source / self.directory.name / "latest"):
            if is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return source if storage.size_of(source / SUMS) is not None else None

    def target(self, path: Path) -> Path:
        if os.path.isdir(path) and not is_name(path.name):
            return path
        try:
            size = storage.size_of(path)
            if size is None:
                raise damaged([f"{path.name} {storage.absence(path)}"], path)
            name = storage.read_text(path).removesuffix("\n") if size <= _POINTER_BYTES else f"{size} bytes"
        except OSError as error:
            raise damaged([f"{path.name} cannot be read: {reason(error)}"], path) from error
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

    def recover(self) -> None:
        targets = self.directory / TARGETS
        self.refuse_links()
        if os.path.lexists(targets) and not os.path.isdir(targets):
            storage.set_aside(targets)
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

    def listed(self) -> list[Path]:
        pointers = [self.directory / name for name in sorted(filter(is_name, storage.names(self.directory)))]
        led_to = set()
        for pointer in pointers:
            with suppress(CheckpointDamaged):  # `examine` says why
                led_to.add(self.target(pointer).name)
        nameless = [self.path(name) for name in sorted(filter(is_target, self.targets() - led_to))]
        return pointers + [path for path in nameless if not _is_unfinished(path)]

    def targets(self) -> set[str]:
        """Return the names of the targets in the directory."""
        try:
            return storage.names(self.directory / TARGETS)
        except OSError as error:
            # The other kind of checkpoints in the same directory may be as good as ever.
            self.skip(self.directory / TARGETS, error)
            return set()

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        target = self.target(path)
        try:
            manifest, names = read_manifest(target / SUMS, f"{target.name}/{SUMS}"), storage.names(target)
        except (CheckpointDamaged, OSError) as error:
            raise damaged([str(error)], path) from error
        if manifest.record.name != target.name:
            raise damaged([f"{target.name}/{SUMS} describes {manifest.record.name} instead of {target.name}"], path)
        # Of what is spread over machines, those files that are here.
        here = {name: of for name, of in manifest.files.items() if not self.is_partial or name in names}
        problems = find_problems(replace(manifest, files=here), target, level) + misled(path, manifest.record)
        extra = sorted(names - manifest.files.keys() - {SUMS})
        return manifest, problems + [f"{name} is not part of it" for name in extra]

    def delete(self, name: str) -> None:
        with storage.opened(self.directory, self._pinned) as here:
            storage.remove(self.directory / name, within=here)

    def sweep(self, protected: set[int], *, run: str) -> None:
        for record in self.records(complete=False):
            path = self.path(record.name)
            unused = is_target(record.name) and record.run == run and record.sequence not in protected
            if unused and not os.path.islink(path):
                with self._opened_targets() as targets:
                    # The manifest first: without it the target does not count, whatever else is left when this is interrupted.
                    with storage.opened(path, None, within=targets) as target:
                        storage.remove(path / SUMS, within=target)
                    storage.remove_tree(path, within=targets)

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        """Remove this machine's part of older targets that the main process has removed."""
        for name in sorted(self.targets() - {*kept}):
            older = is_target(name) and int(name.partition("-")[0]) < sequence
            if older and not os.path.islink(self.path(name)):
                self._try_to(partial(self._remove, name))

    def _remove(self, name: str) -> None:
        with self._opened_targets() as targets:
            storage.remove_tree(self.path(name), within=targets)


def new_target(sequence: int) -> str:
    """Return a name that no attempt ever had."""
    return f"{sequence:08d}-{uuid.uuid4().hex[:8]}"


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


# All of a run


def stores_in(directory: Path, *, first: type[CheckpointStore] = FileStore) -> list[CheckpointStore]:
    """Return both kinds of stores of a directory: a run may go on with another kind of manager."""
    kinds: dict[type[CheckpointStore], None] = dict.fromkeys((first, FileStore, TargetStore))
    return [kind(directory) for kind in kinds]


def newest_record(directory: Path) -> Record | None:
    """Return the record of the newest save in a directory, of any kind, from the manifests alone; unreadable ones are left out."""
    found = []
    with suppress(OSError):
        for path in (*directory.glob(f"*{FILE_SUMS}"), *directory.glob(f"{TARGETS}/*/{SUMS}")):
            with suppress(CheckpointError, OSError):
                found.append(read_manifest(path, path.name).record)
    return newest(found)


Found = tuple[Record, CheckpointStore]
"""The record of a checkpoint, and the store that has it."""


class CheckpointDirectory:
    """The checkpoints of one run, in its directory and elsewhere."""

    def __init__(
        self,
        path: Path,
        *,
        first: type[CheckpointStore],
        run_id: str,
        settings: CheckpointSettings,
        compare: Callable[[Path], list[str]],
    ) -> None:
        self.path = path
        self.run_id = run_id
        self._settings = settings
        self._compare = compare
        self.stores = stores_in(path, first=first)
        """Where the checkpoints of the run are: its own store first, then those of other kinds and elsewhere."""
        self.is_split = self.follows = False
        self.resumed: Record | None = None
        """The checkpoint of the run that the process goes on from; `None` from scratch. Known on all ranks."""
        self._branch: Branch | None = None
        self._open_sources: Callable[[], Any] | None = None
        self._sources: Any = None
        self._alone: set[Path] = set()
        self._home: CheckpointStore | None = None
        self._brought: set[Path] = set()
        self._offered: dict[str, tuple[CheckpointStore, Path, int]] = {}
        self._unreadable: set[tuple[CheckpointStore, int]] = set()

    # Object stores

    def look_in(self, sources: Callable[[], object], *, own: bool) -> None:
        """Look for checkpoints in object stores as well, after the run's own directory."""
        self._open_sources = sources
        if own:
            self._sources = sources()
            self._home = self._sources.own()
            self.stores += [self._home] if self._home is not None else []

    def sources_of(self, source: str | Path) -> Any:
        """Return what finds a checkpoint that a URL names; `None` for anything else."""
        scheme, is_url, _ = str(source).partition("://")
        if self._open_sources is None or not is_url or not scheme.isalnum():
            return None
        self._sources = self._sources or self._open_sources()
        return self._sources

    def release(self) -> None:
        """Remove what was brought of other runs, since it has been read."""
        if self._sources is not None:
            self._sources.release()

    def split(self, *, follows: bool) -> None:
        """Note that machines have separate disks: none has the whole of a save, which is read from the object store.

        Args:
            follows: Whether this rank removes, on its machine, what the main process has removed on its own.
        """
        self.is_split = True
        self.follows = follows
        for store in self.stores:
            store.is_partial = not store.is_elsewhere

    # Find and verify one

    def verified(self, source: str | Path) -> tuple[bool, Path]:
        """Find a checkpoint and compare it with its checksums; return whether it was brought from an object store, and its path."""
        store, path = self._resolve(source)
        store.verify(path, self._settings.verify)
        if isinstance(store, FileStore) and not has_sums(path) and path not in self._alone:
            self._alone.add(path)
            logger.warning(
                "%s has no checksums next to it. Those inside of it, compared as checkpoint.verify=%s asks, show damage, but not which "
                "save it is.",
                path,
                self._settings.verify,
            )
        self._record_of(store, path)
        return store.is_elsewhere or path in self._brought, store.target(path)

    def bring(self, source: str | Path, path: Path) -> None:
        """Make a checkpoint that was brought from an object store readable on this machine. Called on all ranks."""
        sources = self.sources_of(source)
        store = self._home if sources is None else sources.named(source)[0]
        if store is not None:
            store.bring(path)

    def describe(self, source: str | Path) -> Record | None:
        """Return the record of a checkpoint, without reading it; `None` for one of another directory."""
        return self._record_of(*self._resolve(source))

    def _record_of(self, store: CheckpointStore, path: Path) -> Record | None:
        record = store.describe(path)
        if record is not None and not self._settings.load_only:
            self.refuse_foreign([(record, store)])
        return record

    def _resolve(self, source: str | Path) -> tuple[CheckpointStore, Path]:
        sources, wanted = self.sources_of(source), source
        stores = self.stores if Path(source) in self._brought else self._whole()
        if sources is not None:
            named, wanted = sources.named(source)
            stores = [named]
        for store in stores:
            found = store.find(wanted)
            if found is not None:
                return store, found
        there = ", ".join(sorted({r.name for store in stores for r in store.records(complete=True)})) or "none"
        if sources is not None:
            raise CheckpointNotFound(
                f"Expected a checkpoint at {source}. Received: none (in {stores[0].location} there are: {there}). Give the URL of one that "
                "is there."
            )
        raise CheckpointNotFound(
            f"Expected a checkpoint: a name in {self.path} (there are: {there}), or a path. Received: {str(source)!r}. Give one "
            f"that is there, or bring it back (is the file system mounted?).{advice_about(Path(source))}"
        )

    # The newest one

    def find_latest(self) -> str | None:
        """Return the newest intact checkpoint of this run's branch, as a source to load; those that are skipped are logged."""
        found = self.records()
        self.refuse_foreign(found)
        found = [(record, store) for record, store in found if not store.is_partial]
        last = newest(record for record, _ in found)
        if last is None:
            return None
        saves = [(r, s) for r, s in found if r.name != "model" and is_on_branch(r, last.branch, last.ancestors)]
        for record, store in sorted(saves, key=lambda pair: (pair[0].sequence, pair[0].name == "latest"), reverse=True):
            # The names of one save have the same content.
            if (store, record.sequence) in self._unreadable:
                continue
            path = store.path_of(record)
            try:
                store.verify(path, self._settings.verify)
            except (CheckpointError, OSError) as error:
                store.skip(path, error)
                continue
            if store.is_elsewhere:
                # From now on it is found in the directory, which other machines may not share.
                self._brought.add(path)
            source = record.name if store is self.stores[0] else str(path)
            self._offered[source] = store, path, record.sequence
            return source
        return None

    def skip(self, source: str, error: Exception) -> None:
        """Leave out a save from now on that `find_latest` has returned and that cannot be read."""
        store, path, sequence = self._offered[source]
        self._unreadable.add((store, sequence))
        store.skip(path, error)

    def refuse_lost(self) -> None:
        """Refuse to begin anew where there are checkpoints of which none can be loaded."""
        storage.refuse_no_directory(self.path)
        # Notes what is skipped, which `lost` lists.
        self.records()
        lost = [line for store in self._whole() for line in store.lost()]
        if lost and self.find_latest() is None:
            listing = "".join(f"\n  {line}" for line in lost)
            raise CheckpointDamaged(
                f"Expected a checkpoint in {self.path} that verifies, since there are some. Received none that does:{listing}\n"
                "Restore one of them (is a file system not mounted?). To start from scratch, name another `dir`, or move these away."
            )

    # All of them

    def records(self, *, complete: bool = False) -> list[Found]:
        """Return the record of every checkpoint, with the store that has it."""
        return [(record, store) for store in self.stores for record in store.records(complete=complete)]

    def _whole(self) -> list[CheckpointStore]:
        """Return the stores whose checkpoints every rank can read."""
        return [store for store in self.stores if not store.is_partial]

    def is_foreign(self) -> bool:
        """Whether another run saves in the directory."""
        return any(record.run != self.run_id for record, _ in self.records())

    def refuse_foreign(self, found: Iterable[Found] | None = None) -> None:
        """Refuse checkpoints of another run, among those that were found or in the directory."""
        found = self.records() if found is None else found
        foreign = [(record, store) for record, store in found if record.run != self.run_id]
        if not foreign:
            return
        record, store = max(foreign, key=lambda pair: pair[0].sequence)
        differences: list[str] = []
        with suppress(CheckpointError, OSError):  # its configuration only makes the refusal clearer
            differences = self._compare(store.target(store.path_of(record)))
        others = "".join(f"\n  {line}" for line in differences)
        advice = ". Give"
        if differences:
            advice = f", whose configuration differs:{others}\nRestore it, or give"
        raise CheckpointMismatch(
            f"Expected {store.location} to contain checkpoints of this run ({self.run_id}). Received: {record.name} of run {record.run}"
            f"{advice} this run its own directory, and `resume` with the path of that checkpoint; checkpoint.load_only only reads."
        )

    def still_good(self) -> str:
        """Return a sentence for an error: it names the complete checkpoints that remain, the newest first."""
        found: list[Record] = []
        with suppress(CheckpointError, OSError):
            found = [record for record, _ in self.records(complete=True)]
        if not found:
            return f"What was complete before was not touched; in {self.path} no complete checkpoint can be seen now."
        newest_first = sorted(found, key=lambda record: record.sequence, reverse=True)
        names = ", ".join(f"{record.name} (step {record.step})" for record in newest_first[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"Still good in {self.path}: {names}{more}."

    # Saves

    def continue_from(self, record: Record | None) -> None:
        """Begin where a checkpoint is; nothing changes on the disk before the next save. Called on all ranks."""
        self.resumed = record
        self._branch = None

    def open_branch(self) -> None:
        """Before the first save, make the directory ready and find out where saves belong."""
        if self._branch is not None:
            return
        storage.make_directory(self.path)
        # Not before the first save: a run that only reads leaves the directory as it is.
        self.stores[0].recover()
        self.stores[0].pin()
        found = self.records()
        self.refuse_foreign(found)
        records = [record for record, _ in found]
        branch = next_branch(records, self.resumed)
        abandoned = {r.sequence for r in records if not is_on_branch(r, branch.number, branch.ancestors)}
        if abandoned:
            origin = f"from {self.resumed.name}" if self.resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.", origin, len(abandoned), self.path
            )
        self._branch = branch

    def next_records(self, names: list[str], *, epoch: int, global_step: int) -> list[Record]:
        """Number the next save, and return its records, one a name."""
        assert self._branch is not None
        self.stores[0].refuse_links()
        self._branch = branch = replace(self._branch, sequence=self._branch.sequence + 1)
        return [
            Record(n, branch.sequence, branch.number, branch.ancestors, self.run_id, global_step, epoch) for n in names
        ]

    def prune(self, pending: frozenset[int]) -> None:
        """Remove the history that retention gives up, once a save is complete; saves whose upload is pending stay."""
        if self._branch is not None:
            keep = self._settings.keep_latest_k
            self.stores[0].prune(run=self.run_id, keep=keep, resumed=self.resumed, pending=pending)

    def tidy(self) -> None:
        """Remove the files that killed saves and deletions have left in the directory of this run, where no other process writes."""
        last = newest_record(self.path)
        if last is None or last.run != self.run_id:
            return
        try:
            for store in self.stores:
                if not isinstance(store, TargetStore) or (self.path / TARGETS).is_dir():
                    store.recover()
            storage.clean(self.path, storage.UPLOADING)
        except OSError as error:
            logger.warning("What killed saves have left in %s could not be removed: %s", self.path, error)
