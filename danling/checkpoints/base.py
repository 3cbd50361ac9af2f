"""What the checkpoint managers share: policy and agreement; where and how a checkpoint is written is a store's business."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from danling.utils.protocols import ReductionDomain

from . import storage
from .backends import stores_in
from .errors import (
    CheckpointDamaged,
    CheckpointDiskError,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    disk_error,
)
from .executor import SaveExecutor
from .litter import pruned_sums
from .mirroring import Mirror, Saved
from .ownership import newest_record
from .policy import Line, Record, history_name, newest, next_line, on_line
from .reading import read_payload
from .settings import CheckpointSettings
from .snapshot import SnapshotBuffers, to_host
from .store import CheckpointStore

logger = logging.getLogger("danling")

T = TypeVar("T")

_ALONE = {
    "full": ": it was verified by those inside of it, which tell damage, but not which save it is.",
    "size": ": all but its tensors was verified by those inside of it.",
    "none": ", and checkpoint.verify='none' looks at nothing else.",
}


class Sources(Protocol):
    """Where checkpoints are found that do not lie in a directory; see `danling.remote.checkpoints.RemoteSources`."""

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


Told = tuple[type[Exception], str]
"""The class and the text of an error."""

_NAMED = 4
"""So many checkpoints are named in an error."""
_SECONDS_BETWEEN_SIGNS = 1.0
"""How often ranks that wait for each other's uploads hear that the others still do."""


class CheckpointManager(ABC):
    """Writes and reads the checkpoints of one run. Every method is called on all ranks, and fails on all or on none.

    Args:
        directory: Where the checkpoints of the run lie.
        domain: All ranks of the run.
        run_id: Identity of the run; checkpoints of another one in the same directory are refused.
        settings: Policy.
        step_mode: Whether history is named by steps.
        compare: Returns how the configuration of a payload (`runner`, `state`) differs from that of this run, one line a key; it makes a
            refusal clearer.
    """

    store_class: ClassVar[type[CheckpointStore]]

    def __init__(
        self,
        directory: str | Path,
        *,
        domain: ReductionDomain,
        run_id: str,
        settings: CheckpointSettings,
        step_mode: bool,
        compare: Callable[[Mapping[str, Any]], list[str]] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.domain = domain
        self.run_id = run_id
        self.settings = settings
        self.step_mode = step_mode
        self._compare = compare
        # A run may go on with another kind of manager: what the other kinds have written counts and can be loaded.
        self.stores = stores_in(self.directory, first=self.store_class, run_id=run_id)
        self.store = self.stores[0]
        self._executor = SaveExecutor()
        self._buffers = SnapshotBuffers()
        self._line: Line | None = None
        self._resumed: Record | None = None
        self._closed = False
        self._alone: set[Path] = set()
        self._sources: Sources | None = None
        self._brought: dict[Path, int] = {}
        self._damaged: set[Path] = set()
        self.apart = Apart()
        """Whether machines have disks of their own; said before anything is loaded."""
        self.mirror: Mirror | None = None
        """Copies what is saved to another place in the background; on all ranks or on none."""
        self.before_save: Callable[[], None] = _nothing
        """Called on rank 0 before a save begins; what it raises refuses the save on all ranks."""
        self.after_save: Callable[[Mapping[str, Any]], None] = _unheard
        """Called on rank 0 with the payload of a full state that lies on the disk, maybe in the background; it must not communicate."""

    def look_in(self, sources: Sources) -> None:
        """Look for checkpoints elsewhere as well: for those of the run after its own directory, and for what a URL names.

        Args:
            sources: Where.
        """
        self._sources = sources
        self.stores += sources.own()

    def lie_apart(self, apart: Apart) -> None:
        """Hear whether machines have disks of their own: what lies there is kept as before, and read from where all of it lies.

        Args:
            apart: Whether they have.
        """
        self.apart = apart
        for store in self.stores:
            store.is_part = apart.any and not store.is_elsewhere

    def _whole(self) -> list[CheckpointStore]:
        """Return the stores whose checkpoints every rank can read."""
        return [store for store in self.stores if not store.is_part]

    # Saving

    def save_checkpoint(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int, history: bool = False, best: bool = False
    ) -> None:
        """Save a full state as `latest`, and under its history name and as `best` when asked to. Call on all ranks.

        Live tensors are copied before the call returns where the save goes on in the background. History and best are always
        written; another save that has not begun gives way to the next one.

        Args:
            payload: The state; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.
            history: Keep it under its history name.
            best: Make it `best`.

        Raises:
            CheckpointError: If it, or one that was going on in the background, could not be written.
        """
        names = [history_name(step_mode=self.step_mode, epoch=epoch, global_step=global_step)] if history else []
        names += ["best"] if best else []
        # `latest` becomes visible last: it is what a restart looks for first.
        self._save(payload, [*names, "latest"], epoch=epoch, global_step=global_step)

    def export_model(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Write weights only, as `model`; `latest` is left alone. Call on all ranks.

        Args:
            payload: The weights; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.

        Raises:
            CheckpointError: As `save_checkpoint`.
        """
        self._save(payload, ["model"], epoch=epoch, global_step=global_step)

    @abstractmethod
    def _save(self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int) -> None:
        """Write a payload under names, now or in the background."""

    def _open_attempt(self, names: list[str], *, needed: int, epoch: int, global_step: int) -> list[Record]:
        """Check that a save can be made, and return its records. Call on rank 0.

        Args:
            names: Its names.
            needed: Bytes it takes.
            epoch: Completed epochs.
            global_step: Committed updates.
        """
        self.before_save()
        if self._line is None:
            self._line = self._open_line()
        self._make_room(needed)
        self._line = replace(self._line, sequence=self._line.sequence + 1)
        line = self._line
        return [Record(n, line.sequence, line.branch, line.ancestors, self.run_id, global_step, epoch) for n in names]

    def _make_room(self, needed: int) -> None:
        """Refuse a save that the disk has no room for, though what waits to be copied elsewhere is given up for it."""
        try:
            storage.require_space(self.directory, needed)
        except CheckpointError:
            given_up = self.mirror.let_go() if self.mirror is not None else []
            if not given_up:
                raise
            logger.warning(
                "%s has no room for the next save: %s will not be copied to the object store, and may be removed here.",
                self.directory,
                ", ".join(given_up),
            )
            self._prune()
            storage.require_space(self.directory, needed)

    def _mirrored(
        self,
        record: Record,
        names: Sequence[str],
        *,
        target: str | None = None,
        own: Iterable[str] = (),
        put_off: bool = False,
    ) -> None:
        """Tell the mirror of a save, before retention: it takes hold of the files. Called where some were written, maybe in background.

        Args:
            record: What was saved.
            names: Its names.
            target: Name of its directory, where it is one.
            own: The files of it that this rank has written, see `Saved`.
            put_off: Whether another one is still being copied on any rank.
        """
        if self.mirror is not None:
            saved = Saved(record.sequence, record.step, tuple(names), target, tuple(own))
            self.mirror.saved(saved, put_off=put_off)

    def _saved(self, payload: Mapping[str, Any], names: Iterable[str]) -> None:
        """Do what follows when a payload lies under its names on the disk. Called on rank 0, maybe in the background."""
        self._prune()
        if "latest" in names:
            self.after_save(payload)

    def _prune(self) -> None:
        if self._line is not None:
            pending = self.mirror.pending() if self.mirror is not None else frozenset()
            self.store.prune(self._line, keep=self.settings.keep_latest_k, resumed=self._resumed, pending=pending)

    def _follow(self, sequence: int, exchange: Callable[[object], list[Any]]) -> None:
        """Remove on machines with disks of their own what the main process has removed on its own. Called in background too.

        Args:
            sequence: Number of the newest save.
            exchange: Gathers a value of every rank on all of them.
        """
        if not self.apart.any:
            return
        kept = exchange(self.store.held() if self.domain.rank == 0 else None)[0]
        if self.apart.follows:
            self.store.follow(sequence, kept)

    def _prepared(self, payload: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return the payload as it is written, and what to call when that is done."""
        if self.settings.is_async:
            return self._buffers.copy(payload)
        return to_host(payload), lambda: None

    # Loading

    def load_checkpoint(
        self,
        source: str | Path,
        *,
        template: Mapping[str, object] | None = None,
        sections: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Return the verified payload of a checkpoint, of this kind of manager or of another, in fresh CPU memory. Call on all ranks.

        Args:
            source: A name in the run's own directory, or a path.
            template: A state such as the one to save. Where it has a DTensor of the same name and shape, the payload of a sharded
                checkpoint has one of the same layout on the same device, of which this rank reads its own shard; else tensors are
                read whole.
            sections: Components to read, such as `["model"]`; `None` reads all.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If it is not what was written.
            CheckpointMismatch: If it lies in this run's directory and belongs to another run, or has a format that is not known.
        """
        return self._read(self._fetched(source), template=template, sections=sections)

    def _fetched(self, source: str | Path) -> tuple[Path, CheckpointStore | None]:
        """Return the verified file or target of a checkpoint, which every rank can read, and the store that it was brought from, if any."""
        self.wait()
        number, path = self.on_main(lambda: self._verified(source))
        if number < 0:
            return path, None
        store = self._stores_of(source)[number]
        self.on_all(lambda: store.bring(path))
        return path, store

    def _read(
        self,
        found: tuple[Path, CheckpointStore | None],
        *,
        template: Mapping[str, object] | None,
        sections: Iterable[str] | None,
    ) -> dict[str, Any]:
        path, store = found

        def read() -> dict[str, Any]:
            pieces = store.pieces(path) if store is not None else None
            try:
                trust = self.settings.trust
                return read_payload(path, template=template, sections=sections, trust=trust, pieces=pieces)
            finally:
                if pieces is not None:
                    pieces.close()

        return self.on_all(read)

    def pass_over(self, source: str | Path, error: Exception) -> bool:
        """Leave a checkpoint out from now on that `find_latest` has found, and whose parts turned out to be damaged as they were read.

        Call on all ranks.

        Args:
            source: What `find_latest` returned.
            error: Why it does not count.

        Returns:
            Whether it is one that was read in parts; others were verified before, and an older one would not help.
        """
        return self.on_main(lambda: self._pass_over(Path(source), error))

    def _pass_over(self, path: Path, error: Exception) -> bool:
        number = self._brought.get(path, -1)
        if number < 0 or path in self._damaged:
            return False
        self._damaged.add(path)
        self.stores[number].pass_over(path, error)
        return True

    def _verified(self, source: str | Path) -> tuple[int, Path]:
        """Return the number of a store that has to bring a checkpoint to every machine, else -1, and the verified file or target."""
        store, path = self._resolve(source)
        store.verify(path, self.settings.verify)
        if store.lacks_sums(path) and path not in self._alone:
            self._alone.add(path)
            logger.warning("%s has no checksums beside it%s", path, _ALONE[self.settings.verify])
        self._record_of(store, path)
        number = self._stores_of(source).index(store) if store.is_elsewhere else self._brought.get(path, -1)
        return number, store.target(path)

    def _stores_of(self, source: str | Path) -> list[CheckpointStore]:
        named = self._sources.named(source) if self._sources is not None else None
        return self.stores if named is None else named[0]

    def _resolve(self, source: str | Path) -> tuple[CheckpointStore, Path]:
        named = self._sources.named(source) if self._sources is not None else None
        number = self._brought.get(Path(source), -1)
        stores, wanted = (self._whole() if number < 0 else self.stores, source) if named is None else named
        if number >= 0 and self.stores[number].pieces(Path(source)) is not None:
            # It stayed where it is, and what lies at its path is another one, or damaged.
            return self.stores[number], Path(source)
        for store in stores:
            found = store.find(wanted)
            if found is not None:
                return store, found
        if named is not None:
            names = sorted({record.name for store in stores for record in store.records(complete=True)})
            raise CheckpointNotFound(
                f"Expected a checkpoint at {source}. Received: none (in {stores[0].place} there are: {', '.join(names) or 'none'}). Give "
                "the URL of one that is there."
            )
        present = sorted({record.name for store in self.stores for record in store.records(complete=True)})
        raise CheckpointNotFound(
            f"Expected a checkpoint: a name in {self.directory} (there are: {', '.join(present) or 'none'}), or a path. "
            f"Received: {str(source)!r}. Give one that is there, or bring it back (is the file system mounted?)."
        )

    def find_latest(self) -> str | None:
        """Return the newest checkpoint of this run's line that is intact, as a source to load; those that are skipped are logged.

        Call on all ranks.
        """
        return self.on_main(self._find_latest)

    def _find_latest(self) -> str | None:
        found = self._records()
        self._refuse_foreign(found)
        found = [(record, store) for record, store in found if not store.is_part]
        last = newest(record for record, _ in found)
        if last is None:
            return None
        line = [(r, s) for r, s in found if r.name != "model" and on_line(r, last.branch, last.line)]
        for record, store in sorted(line, key=lambda pair: (pair[0].sequence, pair[0].name == "latest"), reverse=True):
            path = store.path(record.name)
            if path in self._damaged:
                continue
            try:
                store.verify(path, self.settings.verify)
            except (CheckpointError, OSError) as error:
                store.pass_over(path, error)
            else:
                if store.is_elsewhere:
                    # From now on it is found in the directory, which other machines may not share.
                    self._brought[path] = self.stores.index(store)
                return record.name if store is self.store else str(path)
        return None

    def refuse_lost(self) -> None:
        """Refuse to begin anew where checkpoints lie of which none can be loaded. Call on all ranks.

        Raises:
            CheckpointDamaged: If there are such.
            CheckpointDiskError: If the directory is a link to where nothing is mounted, so that nobody knows.
        """
        self.on_main(self._refuse_lost)

    def _refuse_lost(self) -> None:
        storage.refuse_no_directory(self.directory)
        self._records()
        lost = [line for store in self._whole() for line in store.lost()]
        if lost and self._find_latest() is None:
            listing = "".join(f"\n  {line}" for line in lost)
            raise CheckpointDamaged(
                f"Expected a checkpoint in {self.directory} that verifies, since some lie there. Received none that does:{listing}\n"
                "Mend or bring back one of them (is a file system not mounted?). To begin anew, name another `dir`, or move these away."
            )

    def check_directory(self) -> None:
        """Refuse a directory in which another run saves; nothing is written. Call on all ranks.

        Raises:
            CheckpointMismatch: If there is a checkpoint of another run.
        """
        self.on_main(lambda: self._refuse_foreign(self._records()))

    def tidy(self) -> None:
        """Remove what killed saves and deletions have left in the directory of this run. Call on all ranks, where nobody else writes."""
        self.on_main(self._tidy)

    def _tidy(self) -> None:
        last = newest_record(self.directory)
        if last is None or last.run != self.run_id:
            return
        try:
            for store in self.stores:
                if store.is_used():
                    store.recover()
            storage.clean(self.directory, storage.UPLOADING)
            for orphan in pruned_sums(self.directory, self.settings.keep_latest_k):
                storage.remove(orphan)
        except OSError as error:
            logger.warning("What killed saves have left in %s could not be removed: %s", self.directory, error)

    def is_foreign(self) -> bool:
        """Whether another run saves in the directory."""
        return self.on_main(lambda: any(record.run != self.run_id for record, _ in self._records()))

    def _records(self) -> list[tuple[Record, CheckpointStore]]:
        return [(record, store) for store in self.stores for record in store.records(complete=False)]

    def _refuse_foreign(self, found: Iterable[tuple[Record, CheckpointStore]]) -> None:
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

    def step_of(self, source: str | Path) -> int:
        """Return the committed updates of a checkpoint, without reading it. Call on all ranks.

        Args:
            source: As in `load_checkpoint`.
        """
        record = self.on_main(lambda: self._describe(source))
        return record.step if record is not None else 0

    def begin(self, source: str | Path) -> None:
        """Hear which checkpoint the run goes on from. Call on all ranks.

        Retention spares it. When it is not the newest, the next save begins a new line, and what was saved after it is no longer
        part of the run; until then nothing changes on disk.

        Args:
            source: As in `load_checkpoint`.
        """
        self.wait()
        self._resumed = self.on_main(lambda: self._describe(source))
        self._line = None
        self.release()

    @property
    def resumed(self) -> Record | None:
        """The checkpoint of this run that it goes on from; `None` from scratch, and from another run."""
        return self._resumed

    def release(self) -> None:
        """Remove what was brought of other runs, since it has been read. Call on all ranks."""
        if self._sources is not None:
            self._sources.release()

    def bring_file(self, source: str | Path) -> Path | None:
        """Return where a file of weights lies that a URL names; `None` for anything else. Call on all ranks.

        Args:
            source: The URL, or whatever else a user has named.
        """
        if self._sources is None or "://" not in str(source):
            return None
        return self.on_all(lambda: self._sources.bring_file(str(source)) if self._sources is not None else None)

    def _describe(self, source: str | Path) -> Record | None:
        return self._record_of(*self._resolve(source))

    def _record_of(self, store: CheckpointStore, path: Path) -> Record | None:
        record = store.describe(path)
        if record is not None and not self.settings.load_only:
            self._refuse_foreign([(record, store)])
        return record

    def _open_line(self) -> Line:
        """Make the directory ready for saves, and return where they belong."""
        storage.make_directory(self.directory)
        self.store.recover()
        found = self._records()
        self._refuse_foreign(found)
        records = [record for record, _ in found]
        line = next_line(records, self._resumed)
        abandoned = {r.sequence for r in records if not on_line(r, line.branch, line.ancestors)}
        if abandoned:
            origin = f"from {self._resumed.name}" if self._resumed else "from scratch"
            logger.warning(
                "Going on %s: %d saves in %s are no longer part of this run.", origin, len(abandoned), self.directory
            )
        return line

    # Ending

    def wait(self) -> None:
        """Wait until everything is written. Call on all ranks.

        Raises:
            CheckpointError: If something could not be.
        """
        self._executor.wait()
        self._surface()

    def wait_for_mirror(self) -> None:
        """Wait until the last save is copied to the object store, or cannot be, which `close` raises; at most `checkpoint.wait_timeout`.

        The ranks leave together: one that has little to upload would wait for the others in its next collective, which fails after a while.
        """
        if self.mirror is None:
            return
        if self.domain.size == 1:
            self.mirror.wait(self.settings.wait_timeout)
            return
        waiting = threading.Thread(target=self.mirror.wait, args=(self.settings.wait_timeout,), daemon=True)
        waiting.start()
        while any(self.domain.gather_objects(waiting.is_alive())):
            waiting.join(_SECONDS_BETWEEN_SIGNS)

    def maybe_wait_for_staging(self) -> None:
        """Wait until live tensors may change. They may as soon as a save returns: it has copied them by then."""
        return

    def close(self, timeout: float | None = None) -> None:
        """Write what is left, or give up after `timeout` seconds; complete checkpoints stay as they are. May be called twice.

        Nothing is agreed here: a rank that ends because of an error must not wait for the others. Call `wait` before it where all
        of them end together.

        Raises:
            CheckpointError: If something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._end(timeout)
            error = self._executor.take_error()
            self._raise(error, self._told(error))
        finally:
            if self.mirror is not None:
                self.mirror.close(timeout)

    def _end(self, timeout: float | None) -> None:
        if not self._executor.close(timeout):
            logger.warning(
                "A checkpoint was not written within %s seconds and is given up; complete ones are as they were.",
                timeout,
            )

    # Agreement

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its value, or raise its error, on all ranks."""
        value: Any = None
        error: Exception | None = None
        if self.domain.rank == 0:
            try:
                value = action()
            except Exception as raised:
                error = raised
        value, told = self.domain.broadcast_object((value, self._told(error)))
        self._raise(error, told)
        result: T = value
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; return its value here, or raise the error of any rank on all of them."""
        value: Any = None
        error: Exception | None = None
        try:
            value = action()
        except Exception as raised:
            error = raised
        self._agree(error)
        result: T = value
        return result

    def _surface(self) -> None:
        """Raise an error of the background of any rank on all of them."""
        self._agree(self._executor.take_error() or (self.mirror.take_error() if self.mirror is not None else None))

    def _agree(self, error: BaseException | None) -> None:
        told = self.domain.gather_objects(self._told(error))
        self._raise(error, next((entry for entry in told if entry is not None), None))

    @staticmethod
    def _raise(error: BaseException | None, told: Told | None) -> None:
        if isinstance(error, (CheckpointError, ValueError)) and not isinstance(error, CheckpointDiskError):
            raise error
        if told is not None:
            raise told[0](told[1]) from error

    def _told(self, error: BaseException | None) -> Told | None:
        """Return what all ranks hear of an error: it need not be possible to pickle it."""
        if error is None:
            return None
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            path = Path(error.filename or self.directory)
            error = disk_error("write or read", path, error, free=storage.free_bytes(path))
        if isinstance(error, CheckpointDiskError):
            return CheckpointDiskError, f"{error} {self._still_good()}"
        if isinstance(error, (CheckpointError, ValueError)):
            return type(error), str(error)
        received = f"{type(error).__name__}: {error}. {self._still_good()}"
        return CheckpointError, f"Expected a checkpoint to be written or read. Received: {received}"

    def _still_good(self) -> str:
        """Say which checkpoints are complete after a failure, the newest first."""
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


class CollectiveCheckpointManager(CheckpointManager):
    """A manager whose saves take all ranks, so that nobody can make one alone once an evaluation has failed: it is made before."""

    _ahead: object | None = None
    """What the next save takes over from the last one, where that one was made ahead of an evaluation."""

    def save_ahead(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Save a state as `latest` before an evaluation, after which the next save of it writes again only what has changed.

        Call on all ranks. Until then a run that goes on finds this one.

        Args:
            payload: The state; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.

        Raises:
            CheckpointError: As `save_checkpoint`.
        """
        self._save(payload, ["latest"], epoch=epoch, global_step=global_step, ahead=True)

    def is_saved_ahead(self) -> bool:
        """Whether the last save was one ahead and is complete, which is waited for. No communication: may be called on one rank."""
        self._executor.wait()
        return self._ahead is not None

    @abstractmethod
    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int, ahead: bool = False
    ) -> None:
        """Write a payload under names, now or in the background; `ahead` of an evaluation, remember what the next save may take over."""


def _unheard(payload: Mapping[str, Any]) -> None:
    """Nobody waits for a save."""


def _nothing() -> None:
    """Nothing stands in the way of a save."""
