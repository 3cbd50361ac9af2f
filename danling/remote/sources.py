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

from yaml import YAMLError

from danling.checkpoints import storage
from danling.checkpoints.directory import SUFFIX, SUMS, TARGETS, CheckpointStore, FileStore, TargetStore, is_target
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from danling.checkpoints.manifest import Record, is_name
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import is_plain_path, refuse_link
from danling.utils.plain import parse_yaml

from .store import RemoteMissing, RemoteObject, RemoteStore, is_url, open_store
from .stored_run import CHECKPOINTS, Described, Place, RunLayout, StoredRun, chosen, place_of

logger = logging.getLogger("danling")


def bring_files(store: RemoteStore, layout: RunLayout, directory: Path, *, below: str = "") -> list[Path]:
    """Bring the files that a run directory lacks, or has shorter than the store, so that its curves go on."""
    found = (
        (entry, entry.key[len(layout.files) + 1 :])
        for entry in store.list(layout.file(below) if below else layout.files)
    )
    brought = (bring_object(store, entry, name, directory) for entry, name in found)
    return [path for path in brought if path is not None]


def bring_object(store: RemoteStore, found: RemoteObject, name: str, directory: Path) -> Path | None:
    """Bring an object to a directory, and return its path; `None` where as much of it is there already."""
    path = directory / name
    if not is_plain_path(name) or (storage.size_of(path) or -1) >= found.size:
        return None
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
    return path


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

    @property
    def place(self) -> str:
        return self.run.url

    # Finding

    def _described(self, *, complete: bool) -> list[Described]:
        """Return what has a whole manifest, oldest first; what has none is skipped."""
        found = []
        for name, file in self.run.names():
            place = name if not file else f"{name}{SUFFIX}"
            try:
                described = self.run.describe(name, file=file)
            except CheckpointDamaged as error:
                self.skip(Path(place), error)
                continue
            problems = self.run.problems(described)
            if problems:
                self.skip(Path(place), CheckpointDamaged("; ".join(problems)))
            if not (problems and complete):
                found.append(described)
        return sorted(found, key=lambda d: (d.record.sequence, d.name))

    def records(self, *, complete: bool) -> list[Record]:
        return [found.record for found in self._described(complete=complete)]

    def find(self, source: str | Path) -> Path | None:
        path = Path(source)
        name, file = path.name.removesuffix(SUFFIX), path.name.endswith(SUFFIX) or None
        is_own = path.parent in (Path("."), self.directory, self.directory / TARGETS) and not is_url(str(source))
        if not is_own or not (is_name(name) or is_target(name)):
            return None
        try:
            return self._brought_to(chosen(self.run, name, file))
        except CheckpointNotFound:
            return None

    def path_of(self, record: Record) -> Path:
        # A file and a target may have one name, after a change of `checkpoint.backend`.
        return next(self._brought_to(found) for found in self._described(complete=False) if found.record == record)

    def _brought_to(self, found: Described) -> Path:
        # Not the pointer: in the directory it may lead to another target.
        return self._files.path(found.name) if found.target is None else self._targets.path(found.target)

    def _at(self, path: Path) -> Described:
        return self.run.describe(path.name.removesuffix(SUFFIX), file=path.name.endswith(SUFFIX))

    def record(self, path: Path) -> Record:
        return self._at(path).record

    def describe(self, path: Path) -> Record | None:
        return super().describe(path) if self.is_home else None

    def skip(self, path: Path | str, error: Exception) -> None:
        name = Path(path).name
        below = f"{TARGETS}/{name}" if is_target(name) else name
        super().skip(f"{self.run.url}/{CHECKPOINTS}/{below}", error)

    def lost(self) -> list[str]:
        return [f"{place}: {why}" for place, why in self._skipped.items()]

    # Bringing

    def verify(self, path: Path, level: str) -> None:
        found = self._at(path)
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        storage.make_directory(self.directory)
        storage.require_space(self.directory, sum(size for size, _ in found.manifest.files.values()))
        # `latest` becomes visible last, as in a save.
        others = sorted(self._described(complete=True), key=lambda other: other.name == "latest")
        same = [other for other in others if _is_same(other, found)]
        if found.target is None:
            (file,) = found.manifest.files
            self._files.write(partial(self.run.download, found, file), [o.record for o in same] or [found.record])
        else:
            self._bring_target(found, path)
            self._targets.publish(found.target, [other.name for other in same if is_name(other.name)])

    def _bring_target(self, found: Described, path: Path) -> None:
        refuse_link(self.directory / TARGETS)
        if os.path.isdir(path):
            # It was found damaged, or unfinished. The manifest goes first: without it nothing of it counts.
            storage.remove(path / SUMS)
            storage.remove_tree(path)
        storage.make_directory(path)
        try:
            for file in found.manifest.files:
                storage.write_file(path / file, partial(self.run.download, found, file))
            storage.sync_directory(path)
            storage.write_text(path / SUMS, found.manifest.text())
        except BaseException:
            self._targets.give_up(path.name)
            raise

    def bring(self, path: Path) -> None:
        if not is_first_on_machine():
            return
        if not path.name.endswith(SUFFIX):
            is_here = storage.size_of(path / SUMS) is not None
        else:
            # An older one may have the same name here.
            try:
                is_here = self._files.examine(path, "size")[0].files == self._at(path).manifest.files
            except (CheckpointError, OSError):
                is_here = False
            is_here = is_here and storage.size_of(path) is not None
        if not is_here:
            self.verify(path, "full")


def _is_same(other: Described, found: Described) -> bool:
    """Whether two names have one content: of one save, a file under each name or one target."""
    if found.target is not None or other.target is not None:
        return other.target == found.target
    contents = {*other.manifest.files.values()} == {*found.manifest.files.values()}
    return contents and other.record.sequence == found.record.sequence


_BROUGHT = f"{storage.STAGED}from-"
_CONFIG = "metadata/config.full.yaml"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


class RemoteSources:
    """Where a manager finds checkpoints in object stores: those of its run, and what a URL names."""

    def __init__(
        self,
        directory: Path,
        *,
        connect: Callable[[str], RemoteStore],
        home: tuple[str, RunLayout] | None,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._home = home
        self._others: dict[str, RemoteCheckpoints] = {}

    def own(self) -> RemoteCheckpoints | None:
        """Return the store of the run itself."""
        return None if self.home is None else RemoteCheckpoints(self._directory, self.home)

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

    def named(self, source: str | Path) -> tuple[RemoteCheckpoints, str]:
        """Return the store to look in for a URL, and the name to look for."""
        place = place_of(str(source))
        return self._named(place), f"{place.name}{SUFFIX}" if place.file else place.name

    def _named(self, place: Place) -> RemoteCheckpoints:
        key = f"{place.base}/{place.layout.root}"
        if key not in self._others:
            run, directory = StoredRun(self._connect(place.base), place.layout), self._place_for(key)
            self._others[key] = RemoteCheckpoints(directory, run, is_home=False)
        return self._others[key]

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

    def brought(self, url: str) -> Path:
        """Bring a checkpoint that a URL names, and return its file or target."""
        store, name = self.named(url)
        found = store.find(name)
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
        sources = RemoteSources(Path(folder), connect=connect, home=None)
        path = sources.bring_file(str(source))
        if path is None:
            path = sources.brought(str(source))
            place = place_of(str(source))
            for name in files:
                bring_files(connect(place.base), place.layout, Path(folder), below=name)
        yield path
