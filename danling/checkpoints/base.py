"""What the checkpoint managers share: when a save is made and who hears of it; where and how it is written is a store's business."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from danling.utils.protocols import ReductionDomain

from .agreement import RankAgreement
from .executor import SaveExecutor
from .lineage import SaveLineage
from .mirroring import Mirror, Saved
from .policy import Record, history_name
from .reading import read_payload
from .search import Apart, CheckpointSearch, Sources
from .settings import CheckpointSettings
from .snapshot import SnapshotBuffers, to_host
from .store import CheckpointStore

logger = logging.getLogger("danling")

T = TypeVar("T")

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
        self.settings = settings
        self.step_mode = step_mode
        self.search = CheckpointSearch(
            self.directory, first=self.store_class, run_id=run_id, settings=settings, compare=compare
        )
        self.store = self.search.stores[0]
        self._ranks = RankAgreement(domain, self.directory, still_good=self.search.still_good)
        self._lineage = SaveLineage(self.search, settings, mirror=lambda: self.mirror)
        self._executor = SaveExecutor()
        self._buffers = SnapshotBuffers()
        self._closed = False
        self.mirror: Mirror | None = None
        """Copies what is saved to another place in the background; on all ranks or on none."""
        self.before_save: Callable[[], None] = _nothing
        """Called on rank 0 before a save begins; what it raises refuses the save on all ranks."""
        self.planned_history: Callable[[], int] = int
        """Returns how many checkpoints with a history name the whole run will make; 0 where that is not known."""
        self._said_need = False
        self.after_save: Callable[[Mapping[str, Any]], None] = _unheard
        """Called on rank 0 with the payload of a full state that lies on the disk, maybe in the background; it must not communicate."""

    @property
    def stores(self) -> list[CheckpointStore]:
        """Where the checkpoints of the run lie: its own store first, then those of other kinds and elsewhere."""
        return self.search.stores

    def look_in(self, sources: Callable[[], Sources], *, own: bool) -> None:
        """Look for checkpoints in object stores as well, after the run's own directory; see `CheckpointSearch.look_in`."""
        self.search.look_in(sources, own=own)

    def lie_apart(self, apart: Apart) -> None:
        """Hear whether machines have disks of their own: what lies there is kept as before, and read from where all of it lies.

        Args:
            apart: Whether they have; said before anything is loaded.
        """
        self.search.lie_apart(apart)

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
        """Check that a save can be made, and return its records. Call on rank 0."""
        self.before_save()
        self._say_need(needed)
        return self._lineage.open_attempt(names, needed=needed, epoch=epoch, global_step=global_step)

    def _say_need(self, size: int) -> None:
        """Say, once, what the run will need on disk where all of its history is kept. Called on rank 0."""
        count = 0 if self._said_need or self.settings.keep_latest_k else self.planned_history()
        self._said_need = True
        if count > 1:
            logger.info(
                "%d checkpoints of %s will be kept in %s, %s in all; checkpoint.keep_latest_k=3 keeps three.",
                count,
                _as_size(size),
                self.directory,
                _as_size(count * size),
            )

    def _mirrored(
        self,
        record: Record,
        names: Sequence[str],
        *,
        target: str | None = None,
        own: Iterable[str] = (),
        put_off: bool = False,
    ) -> None:
        """Tell the mirror of a save, before retention: it takes hold of the files. Called where some were written, maybe in background."""
        if self.mirror is not None:
            saved = Saved(record.sequence, record.step, tuple(names), target, tuple(own))
            self.mirror.saved(saved, put_off=put_off)

    def _saved(self, payload: Mapping[str, Any], names: Iterable[str]) -> None:
        """Do what follows when a payload lies under its names on the disk. Called on rank 0, maybe in the background."""
        self._lineage.prune()
        if "latest" in names:
            self.after_save(payload)

    def _follow(self, sequence: int, exchange: Callable[[object], list[Any]]) -> None:
        """Remove on machines with disks of their own what the main process has removed on its own; see `SaveLineage.follow`."""
        self._lineage.follow(sequence, exchange, is_main=self.domain.rank == 0)

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

    def _fetched(self, source: str | Path) -> Path:
        """Return the verified file or target of a checkpoint, which every rank can read."""
        self.wait()
        number, path = self.on_main(lambda: self.search.verified(source))
        if number >= 0:
            store = self.search.stores_for(source)[number]
            self.on_all(lambda: store.bring(path))
        return path

    def _read(
        self,
        path: Path,
        *,
        template: Mapping[str, object] | None,
        sections: Iterable[str] | None,
    ) -> dict[str, Any]:
        trust = self.settings.trust
        return self.on_all(lambda: read_payload(path, template=template, sections=sections, trust=trust))

    def skip(self, source: str, error: Exception) -> None:
        """Leave out a save from now on that `find_latest` has returned and that cannot be read. Call on all ranks.

        Args:
            source: What `find_latest` returned.
            error: Why it does not count.
        """
        self.on_main(lambda: self.search.skip(source, error))

    def find_latest(self) -> str | None:
        """Return the newest checkpoint of this run's line that is intact, as a source to load; those that are skipped are logged.

        Call on all ranks.
        """
        return self.on_main(self.search.find_latest)

    def refuse_lost(self) -> None:
        """Refuse to begin anew where checkpoints lie of which none can be loaded. Call on all ranks.

        Raises:
            CheckpointDamaged: If there are such.
            CheckpointDiskError: If the directory is a link to where nothing is mounted, so that nobody knows.
        """
        self.on_main(self.search.refuse_lost)

    def check_directory(self) -> None:
        """Refuse a directory in which another run saves; nothing is written. Call on all ranks.

        Raises:
            CheckpointMismatch: If there is a checkpoint of another run.
        """
        self.on_main(lambda: self.search.refuse_foreign(self.search.records()))

    def tidy(self) -> None:
        """Remove what killed saves and deletions have left in the directory of this run. Call on all ranks, where nobody else writes."""
        self.on_main(self.search.tidy)

    def is_foreign(self) -> bool:
        """Whether another run saves in the directory. Call on all ranks."""
        return self.on_main(self.search.is_foreign)

    def step_of(self, source: str | Path) -> int:
        """Return the committed updates of a checkpoint, without reading it. Call on all ranks.

        Args:
            source: As in `load_checkpoint`.
        """
        record = self.on_main(lambda: self.search.describe(source))
        return record.step if record is not None else 0

    def begin(self, source: str | Path) -> None:
        """Hear which checkpoint the run goes on from. Call on all ranks.

        Retention spares it. When it is not the newest, the next save begins a new line, and what was saved after it is no longer
        part of the run; until then nothing changes on disk.

        Args:
            source: As in `load_checkpoint`.
        """
        self.wait()
        self._lineage.continue_from(self.on_main(lambda: self.search.describe(source)))
        self.release()

    @property
    def resumed(self) -> Record | None:
        """The checkpoint of this run that it goes on from; `None` from scratch, and from another run."""
        return self._lineage.resumed

    def release(self) -> None:
        """Remove what was brought of other runs, since it has been read. Call on all ranks."""
        self.search.release()

    def bring_file(self, source: str | Path) -> Path | None:
        """Return where a file of weights lies that a URL names; `None` for anything else. Call on all ranks.

        Args:
            source: The URL, or whatever else a user has named.
        """
        sources = self.search.sources_of(source)
        if sources is None:
            return None
        return self.on_all(lambda: sources.bring_file(str(source)))

    # Ending

    def wait(self) -> None:
        """Wait until everything is written. Call on all ranks.

        Raises:
            CheckpointError: If something could not be.
        """
        self._executor.wait()
        self._surface()

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027
        """Refuse weights that no checkpoint of this kind can hold, before anything is trained. No communication.

        Args:
            weights: Parameters by name; of sharded ones what this rank holds is looked at.

        Raises:
            ValueError: If there is such a one.
        """

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
            self._ranks.raise_alone(self._executor.take_error())
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
        return self._ranks.on_main(action)

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; return its value here, or raise the error of any rank on all of them."""
        return self._ranks.on_all(action)

    def _surface(self) -> None:
        """Raise an error of the background of any rank on all of them."""
        self._ranks.agree(
            self._executor.take_error() or (self.mirror.take_error() if self.mirror is not None else None)
        )


def _as_size(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u), (1.0, "bytes"))
    return f"{size / unit:.3g} {name}"


def _unheard(payload: Mapping[str, Any]) -> None:
    """Nobody waits for a save."""


def _nothing() -> None:
    """Nothing stands in the way of a save."""
