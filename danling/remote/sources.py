"""Where a run and the commands find checkpoints in object stores, and how they are brought here.

A checkpoint is downloaded, compared with its SHA-256 and committed in the directory as a save would be, so that all that follows reads it
from there. What does not verify is skipped for an older one, like a file on the disk."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from yaml import YAMLError

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from danling.checkpoints.manifest import Line, Record, is_name
from danling.checkpoints.store import SUFFIX, SUMS, TARGETS, CheckpointStore, FileStore, TargetStore, is_target
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import is_plain_path, refuse_link
from danling.utils.plain import parse_yaml

from .store import RemoteMissing, RemoteObject, RemoteStore, is_url, open_store
from .stored_run import Described, Place, RunLayout, StoredRun, chosen, place_of

logger = logging.getLogger("danling")


def bring_files(store: RemoteStore, layout: RunLayout, directory: Path, *, below: str = "") -> list[Path]:
    """Bring what is missing in a run directory, or shorter there than in the store, so that its curves go on."""
    found = (
        (entry, entry.key[len(layout.files) + 1 :])
        for entry in store.list(layout.file(below) if below else layout.files)
    )
    brought = (bring_object(store, entry, name, directory) for entry, name in found)
    return [path for path in brought if path is not None]


def bring_object(store: RemoteStore, found: RemoteObject, name: str, directory: Path) -> Path | None:
    """Bring an object to a directory, and return its path; `None` where as much of it lies there already."""
    path = directory / name
    if not is_plain_path(name) or (storage.size_of(path) or -1) >= found.size:
        return None
    storage.make_directory(path.parent)
    _bring(store, found, path)
    return path


def _bring(store: RemoteStore, found: RemoteObject, path: Path) -> None:
    staged = storage.staged_name(path.parent)
    storage.write_file(staged, partial(_pour, store, found.key))
    try:
        # The time is that of the last change of the run, not of this copy.
        os.utime(staged, (found.modified.timestamp(), found.modified.timestamp()))
        storage.replace(staged, path)
    except BaseException:
        storage.discard(staged)
        raise


def _pour(store: RemoteStore, key: str, writer: storage.HashingWriter) -> None:
    for piece in store.chunks(key):
        writer.write(piece)


class RemoteRecords:
    """What both kinds of stores know of a run: its records, and which of them do not count."""

    def __init__(self, run: StoredRun, *, file: bool) -> None:
        self.run = run
        self.file = file
        self._skipped: dict[str, str] = {}

    def described(self, *, complete: bool) -> list[Described]:
        """Return what has a whole manifest, oldest first; what has none is skipped."""
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
        """Return what a name leads to, `None` where there is no such name."""
        try:
            return chosen(self.run, name, self.file)
        except CheckpointNotFound:
            return None

    def skip(self, name: str, error: Exception) -> None:
        """Say, once for each reason, that a checkpoint does not count."""
        place = f"{self.run.url}/checkpoints/"
        place += f"{name}{SUFFIX}" if self.file else f"{TARGETS}/{name}" if is_target(name) else name
        if self._skipped.get(place) != str(error):
            self._skipped[place] = str(error)
            logger.warning("%s is skipped: %s", place, error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint that was skipped."""
        return [f"{place}: {why}" for place, why in self._skipped.items()]


class RemoteCheckpoints(CheckpointStore):
    """What a manager asks in the same way of file checkpoints and of sharded ones; a path is that to which one is brought."""

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

    def skip(self, path: Path, error: Exception) -> None:
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


class RemoteFiles(RemoteCheckpoints, FileStore):
    """The file checkpoints of a run in a store. A path is that of the file in the directory to which it is brought."""

    is_file = True

    def find(self, source: str | Path) -> Path | None:
        """Return where the checkpoint of a name or path of the directory is brought to, if there is one in the store."""
        path = Path(source)
        name = path.name.removesuffix(SUFFIX)
        own = path.parent in (Path("."), self.directory) and not is_url(str(source))
        return self.path(name) if own and is_name(name) and self._found.named(name) is not None else None

    def verify(self, path: Path, level: str) -> None:
        """Bring a checkpoint here, under all names that it has in the store."""
        found = self._described(path)
        file = next(iter(found.manifest.files))
        size, digest = found.manifest.files[file]
        same = [
            other.record
            for other in self._found.described(complete=True)
            if other.record.sequence == found.record.sequence and (size, digest) in other.manifest.files.values()
        ]
        storage.make_directory(self.directory)
        storage.require_space(self.directory, size)
        # `latest` becomes visible last, as in a save.
        records = sorted(same, key=lambda record: record.name == "latest") or [found.record]
        self.write(partial(self.run.download, found, file), records)

    def bring(self, path: Path) -> None:
        """Bring a checkpoint to this machine, where the directory is not that of the main process."""
        # An older one may lie there under the same name.
        if is_first_on_machine() and not self._lies_here(path):
            self.verify(path, "full")

    def _lies_here(self, path: Path) -> bool:
        try:
            here = super().examine(path, "size")[0]
        except (CheckpointError, OSError):
            return False
        return here.files == self._described(path).manifest.files and storage.size_of(path) is not None


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


_BROUGHT = f"{storage.STAGED}from-"
_CONFIG = "metadata/config.full.yaml"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


class RemoteSources:
    """Where a manager finds checkpoints in object stores: those of its run, and what a URL names."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        connect: Callable[[str], RemoteStore],
        home: tuple[str, RunLayout] | None,
    ) -> None:
        self._directory = directory
        self._run_id = run_id
        self._connect = connect
        self._home = home
        self._others: dict[str, list[RemoteFiles | RemoteTargets]] = {}

    def own(self) -> list[CheckpointStore]:
        """Return the stores of the run itself."""
        run = self.home
        return [*self._stores(self._directory, run, is_home=True)] if run is not None else []

    @cached_property
    def home(self) -> StoredRun | None:
        """The run itself in its store, `None` without one."""
        return None if self._home is None else StoredRun(self._connect(self._home[0]), self._home[1])

    def bring_files(self, directory: Path) -> None:
        """Bring the other files of the run, such as its metrics, into its directory; see `danling.remote.attach`."""
        if self.home is not None:
            brought = bring_files(self.home.store, self.home.layout, directory)
            if brought:
                logger.info("Brought %d files of the run from %s.", len(brought), self.home.url)

    def stored_seed(self, asked: str | None) -> int | None:
        """Return the seed of the checkpoint that a run on an empty machine will resume from; `None` where there is none."""
        if is_url(asked):
            place = place_of(str(asked))
            store, layout = self._connect(place.base), place.layout
        elif self.home is not None:
            store, layout = self.home.store, self.home.layout
        else:
            return None
        try:
            settings = parse_yaml(store.get(layout.file(_CONFIG)).decode())
        except (RemoteMissing, ValueError, YAMLError):
            return None
        seed = settings.get("seed") if isinstance(settings, dict) else None
        return seed if isinstance(seed, int) else None

    def named(self, source: str | Path) -> tuple[list[CheckpointStore], str] | None:
        """Return the stores to look in for a URL, and the name to look for; `None` for what is no URL."""
        if not is_url(source):
            return None
        place = place_of(str(source))
        return list(self._named(place)), place.name

    def _named(self, place: Place) -> list[RemoteFiles | RemoteTargets]:
        key = f"{place.base}/{place.layout.root}"
        if key not in self._others:
            run = StoredRun(self._connect(place.base), place.layout)
            self._others[key] = self._stores(self._place_for(key), run, is_home=False)
        files, targets = self._others[key]
        return {True: [files], False: [targets], None: [files, targets]}[place.file]

    def bring_file(self, url: str) -> Path | None:
        """Bring what another program wrote, and return where it lies now; `None` for the URL of a run. May be called on all ranks."""
        parent, _, name = url.rpartition("/")
        if not name.endswith(_WEIGHTS) or is_name(name.removesuffix(SUFFIX)):
            return None
        path = self._place_for(url) / name
        if is_first_on_machine():
            storage.make_directory(path.parent)
            chunks = self._connect(parent).chunks(name)
            storage.write_file(path, lambda writer: [writer.write(piece) for piece in chunks])
        return path

    def brought(self, url: str) -> Path:
        """Bring a checkpoint that a URL names, and return its file or target."""
        place = place_of(url)
        for store in self._named(place):
            found = store.find(place.name)
            if found is not None:
                store.verify(found, "full")
                return found
        raise CheckpointNotFound(f"Expected a checkpoint at {url}. Received: none. Name one that is there.")

    def release(self) -> None:
        """Remove what was brought of other runs: it has been read."""
        if self._others and is_first_on_machine():
            for name in storage.names(self._directory):
                if name.startswith(_BROUGHT):
                    storage.remove_tree(self._directory / name)
        self._others.clear()

    def _stores(self, directory: Path, run: StoredRun, *, is_home: bool) -> list[RemoteFiles | RemoteTargets]:
        return [kind(directory, run, run_id=self._run_id, is_home=is_home) for kind in (RemoteFiles, RemoteTargets)]

    def _place_for(self, url: str) -> Path:
        # The same on all ranks, and a name that the next start removes if this one is killed.
        return self._directory / f"{_BROUGHT}{hashlib.sha256(url.encode()).hexdigest()[:16]}"


@contextmanager
def local_copy(
    source: str | Path,
    *,
    connect: Callable[[str], RemoteStore] = open_store,
    files: Sequence[str] = (),
) -> Iterator[Path]:
    """Yield the path of a checkpoint: of a copy that was verified, where a URL names it. The copy is removed when the context ends."""
    if not is_url(source):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="danling-copy-") as folder:
        sources = RemoteSources(Path(folder), run_id="", connect=connect, home=None)
        path = sources.bring_file(str(source))
        if path is None:
            path = sources.brought(str(source))
            place = place_of(str(source))
            for name in files:
                bring_files(connect(place.base), place.layout, Path(folder), below=name)
        yield path
