"""The directory of a run's checkpoints: which one is meant, which is the newest intact one, where saves belong, and retention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import storage
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .manifest import Line, Record, newest, next_line, on_line
from .reading import newest_record, read_payload, stores_in
from .store import CheckpointStore

if TYPE_CHECKING:
    from .manager import CheckpointSettings

logger = logging.getLogger("danling")

Found = tuple[Record, CheckpointStore]
"""The record of a checkpoint, and the store that has it."""

_ALONE = {
    "full": ": it was verified by those inside of it, which tell damage, but not which save it is.",
    "size": ": all but its tensors was verified by those inside of it.",
    "none": ", and checkpoint.verify='none' looks at nothing else.",
}
_NAMED = 4
"""So many checkpoints are named in an error."""


@dataclass(frozen=True)
class DiskSharing:
    """Whether the ranks of a run share a disk. Where they do not, no machine has the whole of a save, and only an object store has."""

    is_split: bool = False
    follows: bool = False


class CheckpointDirectory:
    """The checkpoints of one run, in its directory and elsewhere. Nothing here communicates; what accesses a disk runs on rank 0."""

    def __init__(
        self,
        path: Path,
        *,
        first: type[CheckpointStore],
        run_id: str,
        settings: CheckpointSettings,
        compare: Callable[[Mapping[str, Any]], list[str]] | None = None,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self._settings = settings
        self._compare = compare
        # A run may go on with another kind of manager: what the other kinds have written counts and can be loaded.
        self.stores = stores_in(path, first=first, run_id=run_id)
        self.sharing = DiskSharing()
        self.mirror: Any = None
        """See `CheckpointManager.mirror`."""
        self.resumed: Record | None = None
        """The checkpoint of the run that the process goes on from; `None` from scratch. Known on all ranks."""
        self._line: Line | None = None
        self._open_sources: Callable[[], Any] | None = None
        self._sources: Any = None
        self._alone: set[Path] = set()
        self._home: CheckpointStore | None = None
        self._brought: set[Path] = set()
        self._offered: dict[str, tuple[CheckpointStore, Path, int]] = {}
        self._unreadable: set[tuple[CheckpointStore, int]] = set()

    # Object stores

    def look_in(self, sources: Callable[[], Any], *, own: bool) -> None:
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
        if self._sources is None:
            self._sources = self._open_sources()
        return self._sources

    def release(self) -> None:
        """Remove what was brought of other runs, since it has been read."""
        if self._sources is not None:
            self._sources.release()

    def share(self, sharing: DiskSharing) -> None:
        """Note whether machines have separate disks: checkpoints there are kept as before, and read from where all of each is."""
        self.sharing = sharing
        for store in self.stores:
            store.is_part = sharing.is_split and not store.is_elsewhere

    # Find and verify one

    def verified(self, source: str | Path) -> tuple[bool, Path]:
        """Find a checkpoint and compare it with its checksums; return whether it was brought from an object store, and its path."""
        store, path = self._resolve(source)
        store.verify(path, self._settings.verify)
        if store.lacks_sums(path) and path not in self._alone:
            self._alone.add(path)
            logger.warning("%s has no checksums next to it%s", path, _ALONE[self._settings.verify])
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
        present = sorted({r.name for store in stores for r in store.records(complete=True)})
        there = ", ".join(present) or "none"
        if sources is not None:
            raise CheckpointNotFound(
                f"Expected a checkpoint at {source}. Received: none (in {stores[0].place} there are: {there}). Give the URL of one that "
                "is there."
            )
        raise CheckpointNotFound(
            f"Expected a checkpoint: a name in {self.path} (there are: {there}), or a path. Received: {str(source)!r}. Give one "
            "that is there, or bring it back (is the file system mounted?)."
        )

    # The newest one

    def find_latest(self) -> str | None:
        """Return the newest checkpoint of this run's line that is intact, as a source to load; those that are skipped are logged."""
        found = self.records()
        self.refuse_foreign(found)
        found = [(record, store) for record, store in found if not store.is_part]
        last = newest(record for record, _ in found)
        if last is None:
            return None
        line = [(r, s) for r, s in found if r.name != "model" and on_line(r, last.branch, last.line)]
        for record, store in sorted(line, key=lambda pair: (pair[0].sequence, pair[0].name == "latest"), reverse=True):
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
        self.records()
        lost = [line for store in self._whole() for line in store.lost()]
        if lost and self.find_latest() is None:
            listing = "".join(f"\n  {line}" for line in lost)
            raise CheckpointDamaged(
                f"Expected a checkpoint in {self.path} that verifies, since there are some. Received none that does:{listing}\n"
                "Mend or bring back one of them (is a file system not mounted?). To begin anew, name another `dir`, or move these away."
            )

    # All of them

    def records(self) -> list[Found]:
        """Return the record of every checkpoint, incomplete ones included, with the store that has it."""
        return [(record, store) for store in self.stores for record in store.records(complete=False)]

    def _whole(self) -> list[CheckpointStore]:
        """Return the stores whose checkpoints every rank can read."""
        return [store for store in self.stores if not store.is_part]

    def is_foreign(self) -> bool:
        """Whether another run saves in the directory."""
        return any(record.run != self.run_id for record, _ in self.records())

    def refuse_foreign(self, found: Iterable[Found]) -> None:
        """Refuse checkpoints of another run."""
        foreign = [(record, store) for record, store in found if record.run != self.run_id]
        if not foreign:
            return
        record, store = max(foreign, key=lambda pair: pair[0].sequence)
        differences: list[str] = []
        if self._compare is not None:
            try:
                path = store.target(store.path_of(record))
                differences = self._compare(read_payload(path, sections=["runner", "state"], mmap=True))
            except (CheckpointError, OSError):
                pass  # its configuration only makes the refusal clearer
        others = "".join(f"\n  {line}" for line in differences)
        raise CheckpointMismatch(
            f"Expected {store.place} to hold checkpoints of this run ({self.run_id}). Received: {record.name} of run {record.run}"
            + (f", whose configuration differs:{others}\nRestore it, or give" if differences else ". Give")
            + " this run its own directory, in which `resume` and a path go on from there; checkpoint.load_only only looks."
        )

    def still_good(self) -> str:
        """Return a sentence for an error: it names the complete checkpoints that remain, the newest first."""
        try:
            found = [record for store in self.stores for record in store.records(complete=True)]
        except (CheckpointError, OSError):
            found = []
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
        self._line = None

    def open_save(self, names: list[str], *, needed: int, epoch: int, global_step: int) -> list[Record]:
        """Number the next save, see that there is room for it, and return its records, one a name."""
        if self._line is None:
            self._line = self._open_line()
        self._make_room(needed)
        self._line = line = replace(self._line, sequence=self._line.sequence + 1)
        return [Record(n, line.sequence, line.branch, line.ancestors, self.run_id, global_step, epoch) for n in names]

    def _open_line(self) -> Line:
        """Make the directory ready for saves, and return where they belong."""
        storage.make_directory(self.path)
        self.stores[0].recover()
        found = self.records()
        self.refuse_foreign(found)
        records = [record for record, _ in found]
        line = next_line(records, self.resumed)
        abandoned = {r.sequence for r in records if not on_line(r, line.branch, line.ancestors)}
        if abandoned:
            origin = f"from {self.resumed.name}" if self.resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.", origin, len(abandoned), self.path
            )
        return line

    def _make_room(self, needed: int) -> None:
        """Refuse a save that the disk has no room for, though uploads that wait are given up for it."""
        try:
            storage.require_space(self.path, needed)
        except CheckpointError:
            given_up = self.mirror.let_go() if self.mirror is not None else []
            if not given_up:
                raise
            logger.warning(
                "%s has no room for the next save: %s will not be copied to the object store, and may be removed here.",
                self.path,
                ", ".join(given_up),
            )
            self.prune()
            storage.require_space(self.path, needed)

    def prune(self) -> None:
        """Remove the history that retention gives up, once a save is complete; saves whose upload is not complete stay."""
        if self._line is not None:
            pending = self.mirror.pending() if self.mirror is not None else frozenset()
            keep = self._settings.keep_latest_k
            self.stores[0].prune(self._line, keep=keep, resumed=self.resumed, pending=pending)

    def follow(self, sequence: int, exchange: Callable[[object], list[Any]], *, is_main: bool) -> None:
        """On machines with separate disks, remove the checkpoints that the main process has removed. On all ranks, in background too."""
        if self.sharing.is_split:
            kept = exchange(self.stores[0].targets() if is_main else None)[0]
            if self.sharing.follows:
                self.stores[0].follow(sequence, kept)

    def tidy(self) -> None:
        """Remove the files that killed saves and deletions have left in the directory of this run, where no other process writes."""
        last = newest_record(self.path)
        if last is None or last.run != self.run_id:
            return
        try:
            for store in self.stores:
                if store.is_used():
                    store.recover()
            storage.clean(self.path, storage.UPLOADING)
        except OSError as error:
            logger.warning("What killed saves have left in %s could not be removed: %s", self.path, error)
