"""Checkpoints in an object store as a manager sees them: further stores beside those of its directory.

To verify such a checkpoint is to bring it here: it is downloaded, compared with its SHA-256 and committed in the directory as a save would
be, so that all that follows reads it from there. What does not verify is passed over for an older one, like a file on the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from danling.checkpoints.file_store import SUFFIX, FileStore
from danling.checkpoints.file_store import SUMS as FILE_SUMS
from danling.checkpoints.outline import READ_WHOLE
from danling.checkpoints.policy import Line, Record, is_name
from danling.checkpoints.reading import read_config
from danling.checkpoints.store import CheckpointStore
from danling.checkpoints.target_store import RUNNER_FILE, SUMS, TARGETS, TargetStore, is_target

from .errors import RemoteError
from .layout import RunLayout
from .ranged import without_tensors
from .store import RemoteStore, is_url, open_store
from .stored_files import bring_files
from .stored_pieces import StoredPieces
from .stored_run import Described, Place, StoredRun, chosen, place_of

logger = logging.getLogger("danling")


class _RemoteRecords:
    """What both kinds of stores know of a run: its records, and which of them do not count.

    Args:
        run: The run.
        file: Whether its file checkpoints are meant, or the others.
    """

    def __init__(self, run: StoredRun, *, file: bool) -> None:
        self.run = run
        self.file = file
        self.passed: dict[str, str] = {}

    def described(self, *, complete: bool, tell: Callable[[str, Exception], None]) -> list[Described]:
        """Return what has a whole manifest, oldest first."""
        found = []
        for name, file in self.run.names():
            if file is not self.file:
                continue
            try:
                described = self.run.describe(name, file=file)
            except CheckpointDamaged as error:
                tell(name, error)
                continue
            problems = self.run.problems(described)
            if problems:
                tell(name, CheckpointDamaged("; ".join(problems)))
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


class RemoteFiles(FileStore):
    """The file checkpoints of a run in a store. A path is that of the file in the directory to which it is brought.

    Args:
        directory: Where checkpoints are brought to.
        run: The run in the store.
        run_id: Identity of the run that reads.
    """

    is_elsewhere = True

    def __init__(self, directory: Path, run: StoredRun, *, run_id: str) -> None:
        super().__init__(directory, run_id=run_id)
        self.run = run
        self._found = _RemoteRecords(run, file=True)

    @property
    def place(self) -> str:
        """Where these checkpoints lie, for errors."""
        return self.run.url

    def records(self, *, complete: bool) -> list[Record]:
        """Return what the manifests in the store record, oldest first."""
        return [found.record for found in self._found.described(complete=complete, tell=self._tell)]

    def record(self, path: Path) -> Record:
        """Return what is recorded of the checkpoint that a path is brought from."""
        return self._described(path).record

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
            for other in self._found.described(complete=True, tell=self._tell)
            if other.record.sequence == found.record.sequence and (size, digest) in other.manifest.files.values()
        ]
        storage.make_directory(self.directory)
        storage.require_space(self.directory, size)
        # `latest` becomes visible last, as in a save.
        records = sorted(same, key=lambda record: record.name == "latest") or [found.record]
        self.write(partial(self.run.download, found, file), records)

    def bring_whole(self, path: Path) -> None:
        """Bring a checkpoint here; the same as `verify`."""
        self.verify(path, "full")

    def bring_outline(self, path: Path) -> None:
        """Bring a checkpoint without the contents of its tensors: a copy for those who look, which nobody may resume from."""
        found = self._described(path)
        size, digest = found.manifest.files[path.name]
        problems = self.run.problems(found)
        if problems:
            raise CheckpointDamaged("; ".join(problems))
        storage.make_directory(self.directory)
        without_tensors(self.run.store, self.run.layout.object(digest), size, path)
        storage.write_text(path.with_name(path.name + FILE_SUMS), found.manifest.text())

    def bring(self, path: Path) -> None:
        """Bring a checkpoint to this machine, where the directory is not that of the main process."""
        # An older one may lie there under the same name.
        if is_first_here() and not self._lies_here(path):
            self.verify(path, "full")

    def _lies_here(self, path: Path) -> bool:
        try:
            here = super().examine(path, "size")[0]
        except (CheckpointError, OSError):
            return False
        return here.files == self._described(path).manifest.files and storage.size_of(path) is not None

    def pass_over(self, path: Path, error: Exception) -> None:
        """Say that a checkpoint does not count."""
        self._tell(path.name.removesuffix(SUFFIX), error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint in the store that was skipped."""
        return [f"{name}: {why}" for name, why in self._found.passed.items()]

    def _tell(self, name: str, error: Exception) -> None:
        _say(self._found, f"{self.run.url}/checkpoints/{name}{SUFFIX}", error)

    def _described(self, path: Path) -> Described:
        return self.run.describe(path.name.removesuffix(SUFFIX), file=True)

    def recover(self) -> None:
        """Nothing: what killed processes have left in a store is for its writer to remove."""

    def prune(self, line: Line, *, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Nothing: what is kept in a store is for its writer to choose."""


class RemoteTargets(TargetStore):
    """The sharded checkpoints of a run in a store. A path is that of the target in the directory to which it is brought.

    Args:
        directory: Where checkpoints are brought to.
        run: The run in the store.
        run_id: Identity of the run that reads.
    """

    is_elsewhere = True

    def __init__(self, directory: Path, run: StoredRun, *, run_id: str) -> None:
        super().__init__(directory, run_id=run_id)
        self.run = run
        self._found = _RemoteRecords(run, file=False)

    @property
    def place(self) -> str:
        """Where these checkpoints lie, for errors."""
        return self.run.url

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

    def records(self, *, complete: bool) -> list[Record]:
        """Return what the manifests in the store record, oldest first; a target without a pointer goes by its own name."""
        return [found.record for found in self._found.described(complete=complete, tell=self._tell)]

    def record(self, path: Path) -> Record:
        """Return what is recorded of a target."""
        return self._described(path).record

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
        found = self._found.described(complete=True, tell=self._tell)
        targets = {described.name: described.target for described in found}
        return [(name, targets.get(name)) for name in names]

    def bring(self, path: Path) -> None:
        """Bring a target to this machine, where the directory is not that of the main process."""
        if is_first_here() and storage.size_of(path / SUMS) is None:
            self.verify(path, "full")  # nothing where it is read in parts

    def pass_over(self, path: Path, error: Exception) -> None:
        """Say that a checkpoint does not count."""
        self._tell(path.name, error)

    def lost(self) -> list[str]:
        """Return a line for each checkpoint in the store that was skipped."""
        return [f"{name}: {why}" for name, why in self._found.passed.items()]

    def _tell(self, name: str, error: Exception) -> None:
        _say(self._found, f"{self.run.url}/checkpoints/{f'{TARGETS}/' if is_target(name) else ''}{name}", error)

    def _described(self, path: Path) -> Described:
        return self.run.describe(path.name, file=False)

    def recover(self) -> None:
        """Nothing: what killed processes have left in a store is for its writer to remove."""

    def prune(self, line: Line, *, keep: int, resumed: Record | None, pending: frozenset[int] = frozenset()) -> None:
        """Nothing: what is kept in a store is for its writer to choose."""


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


class _OtherFiles(RemoteFiles):
    """File checkpoints of another run, which a URL names."""

    def describe(self, path: Path) -> Record | None:
        """Return nothing: it is no checkpoint of this run's line of saves."""
        return None


class _OtherTargets(RemoteTargets):
    """Sharded checkpoints of another run, which a URL names."""

    def describe(self, path: Path) -> Record | None:
        """Return nothing: it is no checkpoint of this run's line of saves."""
        return None


class RemoteSources:
    """Where a manager finds checkpoints in object stores: those of its run, and what a URL names.

    Args:
        directory: The directory of checkpoints of the run.
        run_id: Identity of the run.
        connect: Returns a client of a URL.
        home: URL and keys of the run in the store that the checkpoints of this one are copied to; `None` without one.
    """

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
        return [*self._stores(RemoteFiles, RemoteTargets, self._directory, run)] if run is not None else []

    @cached_property
    def home(self) -> StoredRun | None:
        """The run itself in its store, `None` without one."""
        return None if self._home is None else StoredRun(self._connect(self._home[0]), self._home[1])

    def bring_files(self, directory: Path) -> None:
        """Bring the other files of the run, such as its metrics, into its directory; see `danling.remote.files`."""
        if self.home is not None:
            brought = bring_files(self.home.store, self.home.layout, directory)
            if brought:
                logger.info("Brought %d files of the run from %s.", len(brought), self.home.url)

    def stored_seed(self, asked: str | None) -> int | None:
        """Return the seed of the checkpoint that a run on an empty machine will resume from; `None` where there is none.

        Args:
            asked: The URL that is resumed from, or the name of a checkpoint; `None` takes the newest one.
        """
        if self.home is not None and not is_url(asked):
            self.home.forget()
            url = f"{self.home.url}/checkpoints/{asked or 'latest'}"
        elif is_url(asked):
            url = str(asked)
        else:
            return None
        try:
            with local_copy(url, connect=self._connect, outline=True) as path:
                seed = read_config(path).get("seed")
        except (CheckpointError, OSError) as error:
            if isinstance(error, RemoteError):
                raise
            return None
        return int(seed) if seed is not None else None

    def named(self, source: str | Path) -> tuple[list[CheckpointStore], str] | None:
        """Return the stores to look in for a URL, and the name to look for; `None` for what is no URL.

        Args:
            source: What a user has named.

        Raises:
            CheckpointNotFound: If there is no run in the URL.
        """
        if not is_url(source):
            return None
        place = place_of(str(source))
        return list(self._named(place)), place.name

    def _named(self, place: Place) -> list[RemoteFiles | RemoteTargets]:
        key = f"{place.base}/{place.layout.root}"
        if key not in self._others:
            run = StoredRun(self._connect(place.base), place.layout)
            self._others[key] = self._stores(_OtherFiles, _OtherTargets, self._place_for(key), run)
        files, targets = self._others[key]
        return {True: [files], False: [targets], None: [files, targets]}[place.file]

    def bring_file(self, url: str) -> Path | None:
        """Bring what another program wrote, and return where it lies now; `None` for the URL of a run. May be called on all ranks.

        Args:
            url: URL of a file of weights.
        """
        parent, _, name = url.rpartition("/")
        if not name.endswith(_WEIGHTS) or is_name(name.removesuffix(SUFFIX)):
            return None
        path = self._place_for(url) / name
        if is_first_here():
            storage.make_directory(path.parent)
            chunks = self._connect(parent).chunks(name)
            storage.write_file(path, lambda writer: [writer.write(piece) for piece in chunks])
        return path

    def brought(self, url: str, *, outline: bool) -> Path:
        """Bring a checkpoint that a URL names, and return its file or target.

        Args:
            url: The URL.
            outline: Leave the tensors of a file in the store.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If it is not what was written.
        """
        place = place_of(url)
        for store in self._named(place):
            found = store.find(place.name)
            if found is not None:
                if outline:
                    store.bring_outline(found)
                else:
                    store.bring_whole(found)
                return found
        raise CheckpointNotFound(f"Expected a checkpoint at {url}. Received: none. Name one that is there.")

    def release(self) -> None:
        """Remove what was brought of other runs: it has been read."""
        if self._others and is_first_here():
            for name in storage.names(self._directory):
                if name.startswith(_BROUGHT):
                    storage.remove_tree(self._directory / name)
        self._others.clear()

    def _stores(
        self, files: type[RemoteFiles], targets: type[RemoteTargets], directory: Path, run: StoredRun
    ) -> list[RemoteFiles | RemoteTargets]:
        return [files(directory, run, run_id=self._run_id), targets(directory, run, run_id=self._run_id)]

    def _place_for(self, url: str) -> Path:
        # The same on all ranks, and a name that the next start removes if this one is killed.
        return self._directory / f"{_BROUGHT}{hashlib.sha256(url.encode()).hexdigest()[:16]}"


@contextmanager
def local_copy(
    source: str | Path,
    *,
    connect: Callable[[str], RemoteStore] = open_store,
    outline: bool = False,
    files: Sequence[str] = (),
) -> Iterator[Path]:
    """Yield the path of a checkpoint: of a copy that was verified, where a URL names it. The copy is removed when the context ends.

    Args:
        source: A path, which is yielded as it is, or the URL of a run, of a checkpoint of it, or of a file of weights.
        connect: Returns a client of a URL.
        outline: Leave the tensors of a file in the store: of these the copy has no contents.
        files: Directories of the run's other files that lie above the copy, as in a run directory, such as `metadata`.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        CheckpointDamaged: If it is not what was written.
        RemoteError: If the store does not do what it is asked for.
    """
    if not is_url(source):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="danling-copy-") as folder:
        sources = RemoteSources(Path(folder), run_id="", connect=connect, home=None)
        path = sources.bring_file(str(source))
        if path is None:
            path = sources.brought(str(source), outline=outline)
            place = place_of(str(source))
            for name in files:
                bring_files(connect(place.base), place.layout, Path(folder), below=name)
        yield path


_BROUGHT = f"{storage.STAGED}from-"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def is_first_here() -> bool:
    """Whether this process is the first one of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(known: _RemoteRecords, place: str, error: Exception) -> None:
    if known.passed.get(place) != str(error):
        known.passed[place] = str(error)
        logger.warning("%s is skipped: %s", place, error)
