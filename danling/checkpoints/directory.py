"""Which checkpoints a run has, in its directory and elsewhere: the one that a process continues from, those of other runs and branches.

How they are arranged on the disk is in `file_store.py` and `target_store.py`. Everything here runs on rank 0, communicates nothing and
needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import storage
from .checkpoint_store import CheckpointStore
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .file_store import FILE_SUMS, FileStore, has_sums
from .manifest import Branch, Record, is_on_branch, newest, next_branch, read_manifest
from .target_store import SUMS, TARGETS, TargetStore

if TYPE_CHECKING:
    from .manager import CheckpointSettings

logger = logging.getLogger("danling")

_NAMED = 4
"""So many checkpoints are named in an error."""


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


def stores_in(
    directory: Path, *, first: type[CheckpointStore] = FileStore
) -> list[CheckpointStore]:
    """Return both kinds of stores of a directory: a run may go on with another kind of manager."""
    # A mapping keeps the order, and has the first kind once.
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
        self._home: Any = None
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
            self.stores.append(self._home)

    def sources_of(self, source: str | Path) -> Any:
        """Return what finds a checkpoint that a URL names; `None` for anything else."""
        scheme, is_url, _ = str(source).partition("://")
        if self._open_sources is None or not is_url or not scheme.isalnum():
            return None
        # Opened at the first URL: a run without one does not import the client of a store.
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
        # What was brought from the store of the run is whole, though its files are in a directory in
        # which saves are in parts.
        stores = self.stores if Path(source) in self._brought else self._whole()
        if sources is not None:
            named, wanted = sources.named(source)
            stores = [named]
        for store in stores:
            found = store.find(wanted)
            if found is not None:
                return store, found
        there = (
            ", ".join(sorted({r.name for store in stores for r in store.records(complete=True)}))
            or "none"
        )
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
        # An export has no state to resume from.
        saves = [
            (r, s)
            for r, s in found
            if r.name != "model" and is_on_branch(r, last.branch, last.ancestors)
        ]
        for record, store in sorted(
            saves, key=lambda pair: (pair[0].sequence, pair[0].name == "latest"), reverse=True
        ):
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
        return [
            (record, store) for store in self.stores for record in store.records(complete=complete)
        ]

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
        # Of all stores: a save must not get a number that another one has in the object store.
        branch = next_branch(records, self.resumed)
        abandoned = {
            r.sequence for r in records if not is_on_branch(r, branch.number, branch.ancestors)
        }
        if abandoned:
            origin = f"from {self.resumed.name}" if self.resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.",
                origin,
                len(abandoned),
                self.path,
            )
        self._branch = branch

    def next_records(self, names: list[str], *, epoch: int, global_step: int) -> list[Record]:
        """Number the next save, and return its records, one a name."""
        assert self._branch is not None
        self.stores[0].refuse_links()
        self._branch = branch = replace(self._branch, sequence=self._branch.sequence + 1)
        return [
            Record(
                n, branch.sequence, branch.number, branch.ancestors, self.run_id, global_step, epoch
            )
            for n in names
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
                # A store of targets would make their directory.
                if not isinstance(store, TargetStore) or (self.path / TARGETS).is_dir():
                    store.recover()
            storage.clean(self.path, storage.UPLOADING)
        except OSError as error:
            logger.warning(
                "What killed saves have left in %s could not be removed: %s", self.path, error
            )
