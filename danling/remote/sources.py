"""Where a run and the commands find checkpoints and runs in object stores, and how they are brought here.

A checkpoint is downloaded, compared with its SHA-256 and committed in the directory as a save would be, so that all that follows reads it
from there. What does not verify is skipped for an older one, like a file on the disk."""

from __future__ import annotations

import hashlib
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.checkpoint_store import SUFFIX, CheckpointStore
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.manifest import Manifest, Record, is_name
from danling.checkpoints.target_store import SUMS, TARGETS, TargetStore, is_target, misled
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import is_plain_path, refuse_link
from danling.workspace.runs import Run, find_runs

from .store import RemoteObject, RemoteStore, open_store
from .stored_run import CHECKPOINTS, FILES, RUN_FILES, Described, StoredRun, place_of


def bring_files(store: RemoteStore, prefix: str, directory: Path) -> int:
    """Bring the files below a prefix that a directory lacks, or has shorter than the store; return how many.

    `progress.json` is left out: it belongs to the process that has written it.
    """
    named = [(found, found.key[len(prefix) + 1 :]) for found in store.list(prefix)]
    return sum(
        bring_object(store, found, name, directory)
        for found, name in named
        if name != "progress.json"
    )


def bring_object(store: RemoteStore, found: RemoteObject, name: str, directory: Path) -> bool:
    """Bring an object to a directory, unless as much of it is there already; return whether it was brought."""
    path = directory / name
    if not is_plain_path(name):
        return False
    # Files of a run grow: one that is longer here has lines that the store lacks.
    here = storage.size_of(path)
    if here is not None and here >= found.size:
        return False
    storage.make_directory(path.parent)
    staged = storage.staged_name(path.parent)
    storage.write_file(staged, partial(_pour, store, found.key))
    try:
        # The time is that of the last change of the run, not of this copy.
        os.utime(staged, (found.modified.timestamp(), found.modified.timestamp()))
        storage.replace(staged, path)
    except BaseException:
        storage.discard(staged)
        raise
    return True


def _pour(store: RemoteStore, key: str, writer: storage.HashingWriter) -> None:
    for piece in store.chunks(key):
        writer.write(piece)


class RemoteCheckpoints(CheckpointStore):
    """The checkpoints of a run in a store, files and sharded ones. A path is that to which one is brought."""

    is_elsewhere = True

    def __init__(self, directory: Path, run: StoredRun, *, is_home: bool = True) -> None:
        super().__init__(directory)
        self.run = run
        self.is_home = is_home
        self._files = FileStore(directory)
        self._targets = TargetStore(directory)
        self._digests: dict[str, str] = {}

    @property
    def location(self) -> str:
        return self.run.url

    def shown(self, path: Path | str) -> str:
        name = Path(path).name
        return f"{self.run.url}/{CHECKPOINTS}/{f'{TARGETS}/{name}' if is_target(name) else name}"

    # Finding

    def path_of(self, record: Record) -> Path:
        if is_target(record.name):
            return self._targets.path(record.name)
        # A file and a pointer may have one name, after a change of `checkpoint.backend`.
        return next(
            self.target(self.directory / found.entry)
            for found in self.run.named()
            if found.record == record
        )

    def find(self, source: str | Path) -> Path | None:
        path = Path(source)
        is_own = path.parent in (Path("."), self.directory, self.directory / TARGETS)
        if is_own and (is_name(path.name.removesuffix(SUFFIX)) or is_target(path.name)):
            with suppress(CheckpointNotFound):
                return self.target(self.directory / self.run.choose(path.name).entry)
        return None

    def target(self, path: Path) -> Path:
        # Not the pointer: in the directory it may lead to another target.
        target = self.run.describe(path.name).target
        return path if target is None else self._targets.path(target)

    def listed(self) -> list[Path]:
        return [self.directory / entry for entry in self.run.entries()]

    def describe(self, path: Path) -> Record | None:
        return super().describe(path) if self.is_home else None

    def lost(self) -> list[str]:
        return [f"{self.shown(path)}: {why}" for path, why in self._skipped.items()]

    # Verifying

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        found = self.run.describe(path.name)
        problems = self.run.problems(found)
        if level == "full" and not problems:
            problems = [
                problem
                for file in found.manifest.files
                for problem in self._differences(found, file)
            ]
        if found.target is not None:
            problems += misled(path, found.record)
        return found.manifest, problems

    def _differences(self, found: Described, file: str) -> list[str]:
        # Several names may lead to the same contents, which are read once.
        key = found.key(file)
        if key not in self._digests:
            digest = hashlib.sha256()
            try:
                for piece in self.run.chunks(found, file):
                    digest.update(piece)
            except CheckpointDamaged as error:
                return [str(error)]
            self._digests[key] = digest.hexdigest()
        is_same = self._digests[key] == found.manifest.files[file][1]
        return [] if is_same else [f"{key} has another SHA-256 than was written"]

    # Bringing

    def verify(self, path: Path, level: str) -> None:
        found = self.run.describe(path.name)
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        storage.make_directory(self.directory)
        storage.require_space(
            self.directory, sum(size for size, _ in found.manifest.files.values())
        )
        # All names of the save. `latest` becomes visible last, as in a save.
        same = [
            r.record
            for r in self.run.named()
            if (r.content, r.record.sequence) == (found.content, found.record.sequence)
        ]
        same.sort(key=lambda record: record.name == "latest")
        if found.target is None:
            with self._files.publishing(same) as writer:
                self.run.download(found, found.entry, writer)
        else:
            self._bring_target(found, self._targets.path(found.target))
            self._targets.publish(found.target, [record.name for record in same])

    def _bring_target(self, found: Described, path: Path) -> None:
        refuse_link(self.directory / TARGETS)
        if os.path.isdir(path):
            # It was found damaged, or unfinished. The manifest goes first: without it nothing of it counts.
            storage.remove(path / SUMS)
            storage.remove_tree(path)
        storage.make_directory(path)
        # In the order of a save: all files, their names, the manifest.
        try:
            for file in found.manifest.files:
                storage.write_file(path / file, partial(self.run.download, found, file))
            storage.sync_directory(path)
            storage.write_text(path / SUMS, found.manifest.text())
        except BaseException:
            self._targets.give_up(path.name)
            raise

    def bring(self, path: Path) -> None:
        # The others read from the disk of their machine.
        if not is_first_on_machine():
            return
        local = self._files if path.name.endswith(SUFFIX) else self._targets
        try:
            manifest, problems = local.examine(path, "size")
            # An older file may have the same name here.
            is_here = not problems and (
                is_target(path.name) or manifest == self.run.describe(path.name).manifest
            )
        except (CheckpointError, OSError):
            is_here = False
        if not is_here:
            self.verify(path, "full")


_BROUGHT = f"{storage.STAGED}from-"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


class RemoteSources:
    """Where a manager finds checkpoints in object stores: those of its run, and what a URL names."""

    def __init__(
        self,
        directory: Path,
        *,
        connect: Callable[[str], RemoteStore] = open_store,
        home: StoredRun | None = None,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self.home = home
        """The run itself in its store, `None` without one."""
        self._others: dict[str, RemoteCheckpoints] = {}

    def own(self) -> RemoteCheckpoints:
        """Return the store of the run itself, where it has one."""
        assert self.home is not None
        return RemoteCheckpoints(self._directory, self.home)

    def named(self, source: str | Path) -> tuple[RemoteCheckpoints, str]:
        """Return the store to look in for a URL, and the name to look for."""
        place = place_of(str(source))
        key = f"{place.base}/{place.layout.root}"
        if key not in self._others:
            run = StoredRun(self._connect(place.base), place.layout)
            self._others[key] = RemoteCheckpoints(self._place_for(key), run, is_home=False)
        return self._others[key], place.wanted or "latest"

    def bring_file(self, url: str) -> Path | None:
        """Bring what another program wrote, and return where it is now; `None` for the URL of a run. May be called on all ranks."""
        parent, _, name = url.rpartition("/")
        if not name.endswith(_WEIGHTS) or is_name(name.removesuffix(SUFFIX)):
            return None
        path = self._place_for(url) / name
        if is_first_on_machine():
            storage.make_directory(path.parent)
            storage.write_file(path, partial(_pour, self._connect(parent), name))
        return path

    def release(self) -> None:
        """Remove what was brought of other runs: it has been read."""
        if self._others and is_first_on_machine():
            for name in storage.names(self._directory):
                if name.startswith(_BROUGHT):
                    storage.remove_tree(self._directory / name)
        self._others.clear()

    def _place_for(self, url: str) -> Path:
        # The same on all ranks, and a name that the next start removes if this one is killed.
        return self._directory / f"{_BROUGHT}{hashlib.sha256(url.encode()).hexdigest()[:16]}"


# For the commands


@contextmanager
def local_copy(url: str, *, files: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the path of a verified copy of a checkpoint, with some other files of its run. It is removed when the context ends."""
    with tempfile.TemporaryDirectory(prefix="danling-copy-") as folder:
        sources = RemoteSources(Path(folder))
        path = sources.bring_file(url)
        if path is None:
            store, name = sources.named(url)
            path = store.find(name)
            if path is None:
                raise CheckpointNotFound(
                    f"Expected a checkpoint at {url}. Received: none. Name one that is there."
                )
            store.verify(path, "full")
            for below in files:
                bring_files(store.run.store, store.run.layout.file(below), Path(folder, below))
        yield path


def stored_checkpoints(url: str) -> tuple[RemoteCheckpoints, list[Path]]:
    """Return the checkpoints that a URL means, to be examined where they are."""
    place = place_of(url)
    # Nothing is brought to the directory.
    store = RemoteCheckpoints(Path(CHECKPOINTS), StoredRun(open_store(place.base), place.layout))
    listed = (
        store.listed() if place.wanted is None else [Path(store.run.choose(place.wanted).entry)]
    )
    if not listed:
        raise CheckpointNotFound(
            f"Expected a checkpoint at {url}. Received: none. Name the URL of a run."
        )
    return store, listed


# Directories above a run: a bucket that is no place of runs is not listed whole.
_DEPTH = 5


def runs_below(url: str, directory: Path) -> list[Run]:
    """Return the runs at or below a URL, sorted by name; what they have logged is brought to a directory."""
    store = open_store(url)
    roots = [root for root in _runs(store, "", _DEPTH) if not root or is_plain_path(root)]
    for root in roots:
        prefix = f"{root}/{FILES}".removeprefix("/")
        for found in store.list(prefix):
            name = found.key[len(prefix) + 1 :]
            if name in RUN_FILES or name.startswith("metadata/"):
                bring_object(store, found, name, directory / root)
            elif name.startswith("logs/") and name.count("/") == 1 and is_plain_path(name):
                # Logs are counted, and not read.
                log = directory / root / name
                log.parent.mkdir(parents=True, exist_ok=True)
                log.touch()
    if not roots:
        raise FileNotFoundError(
            f"Expected runs below {store.url!r}. Received: none. Name another URL."
        )
    runs = find_runs(directory)
    if roots == [""]:
        return [replace(run, location=store.url, name=store.url.rpartition("/")[2]) for run in runs]
    return [replace(run, location=f"{store.url}/{run.name}") for run in runs]


def _runs(store: RemoteStore, prefix: str, depth: int) -> Iterator[str]:
    names = store.directories(prefix)
    if FILES in names or CHECKPOINTS in names:
        yield prefix
    elif depth:
        for name in names:
            yield from _runs(store, posixpath.join(prefix, name), depth - 1)
