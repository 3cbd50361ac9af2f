"""Which checkpoint is meant by a name, a path or a URL, and which is the newest that can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import storage
from .backends import stores_in
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .litter import pruned_sums
from .ownership import newest_record
from .policy import Record, newest, on_line
from .reading import read_payload
from .settings import CheckpointSettings
from .store import CheckpointStore

logger = logging.getLogger("danling")

Found = tuple[Record, CheckpointStore]
"""What is recorded of a checkpoint, and the store that it lies in."""

_ALONE = {
    "full": ": it was verified by those inside of it, which tell damage, but not which save it is.",
    "size": ": all but its tensors was verified by those inside of it.",
    "none": ", and checkpoint.verify='none' looks at nothing else.",
}

_NAMED = 4
"""So many checkpoints are named in an error."""


class Sources(Protocol):
    """Where checkpoints are found that do not lie in a directory; see `danling.remote.sources.RemoteSources`."""

    def own(self) -> list[CheckpointStore]:
        """Return the stores of the run itself."""

    def named(self, source: str | Path) -> tuple[list[CheckpointStore], str] | None:
        """Return the stores to look in for a URL, and the name to look for; `None` for what is no URL."""

    def bring_file(self, url: str) -> Path | None:
        """Bring what another program wrote, and return where it lies now; `None` for the URL of a run."""

    def release(self) -> None:
        """Remove what was brought of other runs."""


@dataclass(frozen=True)
class Apart:
    """Whether the ranks of a run do not all see one disk, so that no machine has the whole of a save, and only an object store has.

    Attributes:
        any: Whether there is such a rank.
        follows: Whether this one removes on its machine what the main process has removed on its own.
    """

    any: bool = False
    follows: bool = False


class CheckpointSearch:
    """Finds the checkpoints of one run, in its directory and elsewhere. Nothing here communicates; what reads a disk runs on rank 0."""

    def __init__(
        self,
        directory: Path,
        *,
        first: type[CheckpointStore],
        run_id: str,
        settings: CheckpointSettings,
        compare: Callable[[Mapping[str, Any]], list[str]] | None = None,
    ) -> None:
        self.directory = directory
        self.run_id = run_id
        self._settings = settings
        self._compare = compare
        # A run may go on with another kind of manager: what the other kinds have written counts and can be loaded.
        self.stores = stores_in(directory, first=first, run_id=run_id)
        self._open_sources: Callable[[], Sources] | None = None
        self._sources: Sources | None = None
        self.apart = Apart()
        self._alone: set[Path] = set()
        self._brought: dict[Path, int] = {}
        self._offered: dict[str, tuple[CheckpointStore, Path, int]] = {}
        self._unreadable: set[tuple[CheckpointStore, int]] = set()

    def look_in(self, sources: Callable[[], Sources], *, own: bool) -> None:
        """Look for checkpoints in object stores as well, after the run's own directory.

        Args:
            sources: Opens the stores; called once, when they are needed.
            own: Whether the run has a store of its own; otherwise stores are opened when a URL names one.
        """
        self._open_sources = sources
        if own:
            self._sources = sources()
            self.stores += self._sources.own()

    def sources_of(self, source: str | Path) -> Sources | None:
        """Return what finds a checkpoint that a URL names; `None` for anything else."""
        if self._open_sources is None or "://" not in str(source):
            return None
        if self._sources is None:
            self._sources = self._open_sources()
        return self._sources

    def release(self) -> None:
        """Remove what was brought of other runs, since it has been read."""
        if self._sources is not None:
            self._sources.release()

    def lie_apart(self, apart: Apart) -> None:
        """Hear whether machines have disks of their own: what lies there is kept as before, and read from where all of it lies."""
        self.apart = apart
        for store in self.stores:
            store.is_part = apart.any and not store.is_elsewhere

    # One checkpoint

    def verified(self, source: str | Path) -> tuple[int, Path]:
        """Find a checkpoint and compare it with its checksums."""
        store, path = self._resolve(source)
        store.verify(path, self._settings.verify)
        if store.lacks_sums(path) and path not in self._alone:
            self._alone.add(path)
            logger.warning("%s has no checksums beside it%s", path, _ALONE[self._settings.verify])
        self._record_of(store, path)
        number = self.stores_for(source).index(store) if store.is_elsewhere else self._brought.get(path, -1)
        return number, store.target(path)

    def stores_for(self, source: str | Path) -> list[CheckpointStore]:
        """Return the stores in which a source is looked for, the same on all ranks. May be called on all of them."""
        sources = self.sources_of(source)
        named = sources.named(source) if sources is not None else None
        return self.stores if named is None else named[0]

    def describe(self, source: str | Path) -> Record | None:
        """Return what is recorded of a checkpoint, without reading it; `None` for one that lies elsewhere."""
        return self._record_of(*self._resolve(source))

    def _record_of(self, store: CheckpointStore, path: Path) -> Record | None:
        record = store.describe(path)
        if record is not None and not self._settings.load_only:
            self.refuse_foreign([(record, store)])
        return record

    def _resolve(self, source: str | Path) -> tuple[CheckpointStore, Path]:
        sources = self.sources_of(source)
        named = sources.named(source) if sources is not None else None
        is_brought = Path(source) in self._brought
        stores, wanted = (self.stores if is_brought else self._whole(), source) if named is None else named
        for store in stores:
            found = store.find(wanted)
            if found is not None:
                return store, found
        raise self._not_found(source, stores if named is not None else None)

    def _not_found(self, source: str | Path, named: list[CheckpointStore] | None) -> CheckpointNotFound:
        present = sorted({record.name for store in named or self.stores for record in store.records(complete=True)})
        there = ", ".join(present) or "none"
        if named is not None:
            return CheckpointNotFound(
                f"Expected a checkpoint at {source}. Received: none (in {named[0].place} there are: {there}). Give the URL of one that "
                "is there."
            )
        return CheckpointNotFound(
            f"Expected a checkpoint: a name in {self.directory} (there are: {there}), or a path. Received: {str(source)!r}. Give one "
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
            path = store.path(record.name)
            # The names of one save have the same content.
            if (store, record.sequence) in self._unreadable:
                continue
            try:
                store.verify(path, self._settings.verify)
            except (CheckpointError, OSError) as error:
                store.pass_over(path, error)
            else:
                if store.is_elsewhere:
                    # From now on it is found in the directory, which other machines may not share.
                    self._brought[path] = self.stores.index(store)
                source = record.name if store is self.stores[0] else str(path)
                self._offered[source] = store, path, record.sequence
                return source
        return None

    def skip(self, source: str, error: Exception) -> None:
        """Leave out a save from now on that `find_latest` has returned and that cannot be read."""
        store, path, sequence = self._offered[source]
        self._unreadable.add((store, sequence))
        store.pass_over(path, error)

    def refuse_lost(self) -> None:
        """Refuse to begin anew where checkpoints lie of which none can be loaded."""
        storage.refuse_no_directory(self.directory)
        self.records()
        lost = [line for store in self._whole() for line in store.lost()]
        if lost and self.find_latest() is None:
            listing = "".join(f"\n  {line}" for line in lost)
            raise CheckpointDamaged(
                f"Expected a checkpoint in {self.directory} that verifies, since some lie there. Received none that does:{listing}\n"
                "Mend or bring back one of them (is a file system not mounted?). To begin anew, name another `dir`, or move these away."
            )

    # All of them

    def records(self) -> list[Found]:
        """Return what is recorded of every checkpoint, incomplete ones included, with the store that has it."""
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
        differences = self._differences(record, store)
        others = "".join(f"\n  {line}" for line in differences)
        raise CheckpointMismatch(
            f"Expected {store.place} to hold checkpoints of this run ({self.run_id}). Received: {record.name} of run {record.run}"
            + (f", whose configuration differs:{others}\nRestore it, or give" if differences else ". Give")
            + " this run a directory of its own, in which `resume` and a path go on from there; checkpoint.load_only only looks."
        )

    def _differences(self, record: Record, store: CheckpointStore) -> list[str]:
        if self._compare is None:
            return []
        try:
            path = store.target(store.path(record.name))
            return self._compare(read_payload(path, sections=["runner", "state"], mmap=True))
        except (CheckpointError, OSError):
            return []

    def tidy(self) -> None:
        """Remove what killed saves and deletions have left in the directory of this run, where nobody else writes."""
        last = newest_record(self.directory)
        if last is None or last.run != self.run_id:
            return
        try:
            for store in self.stores:
                if store.is_used():
                    store.recover()
            storage.clean(self.directory, storage.UPLOADING)
            for orphan in pruned_sums(self.directory, self._settings.keep_latest_k):
                storage.remove(orphan)
        except OSError as error:
            logger.warning("What killed saves have left in %s could not be removed: %s", self.directory, error)

    def still_good(self) -> str:
        """Return a sentence that names the checkpoints which are complete, the newest first: what is left after a failure."""
        try:
            found = [record for store in self.stores for record in store.records(complete=True)]
        except (CheckpointError, OSError):
            found = []
        if not found:
            return (
                f"What was complete before was not touched; in {self.directory} no complete checkpoint can be seen now."
            )
        newest_first = sorted(found, key=lambda record: record.sequence, reverse=True)
        names = ", ".join(f"{record.name} (step {record.step})" for record in newest_first[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"Still good in {self.directory}: {names}{more}."
