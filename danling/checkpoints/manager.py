"""The checkpoint managers: when a save is made, of which copy of the state, in which thread, and which errors all ranks raise.

Last comes the manager of single files. `file_store` and `target_store` arrange checkpoints on the disk, and `directory` finds them.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from danling.distributed import Domain

from . import storage
from .checkpoint_store import CheckpointStore
from .copier import SaveCopier, Saved
from .directory import CheckpointDirectory
from .errors import CheckpointDiskError, CheckpointError, disk_error
from .executor import SaveExecutor
from .file_store import FileStore
from .manifest import Record, history_name
from .reading import read_payload
from .snapshot import SnapshotBuffers, count_bytes, to_host
from .target_store import TargetStore, new_target

logger = logging.getLogger("danling")

T = TypeVar("T")

_SECONDS_BETWEEN_SIGNS = 1.0
"""How often ranks that wait for each other's uploads hear that the others still do."""


@dataclass(frozen=True)
class CheckpointSettings:
    """What `config.checkpoint` says.

    Attributes:
        async_mode: `"disabled"`, `"async"` or `"async_with_pinned_mem"`.
        keep_latest_k: History checkpoints to keep; 0 keeps all.
        verify: `"full"`, `"size"` or `"none"`.
        wait_timeout: Seconds to wait at close; `None` waits.
        load_only: Never write.
        trust: Read engine files by unpickling them, which runs code in them.
        dedicated_async_process_group: Whether background saves have their own process group.
        async_process_group_backend: Its backend.
    """

    async_mode: str = "async"
    keep_latest_k: int = 0
    verify: str = "full"
    wait_timeout: float | None = None
    load_only: bool = False
    trust: bool = False
    dedicated_async_process_group: bool = True
    async_process_group_backend: str = "gloo"

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> CheckpointSettings:
        """Read the section; an unset `async_mode` follows `async_enabled`."""
        usual = "async" if section["async_enabled"] else "disabled"
        mode = section["async_mode"] or usual
        names = [name for name in cls.__dataclass_fields__ if name != "async_mode"]
        return cls(async_mode=mode, **{name: section[name] for name in names})

    @property
    def is_async(self) -> bool:
        """Whether saves are written in the background."""
        return self.async_mode != "disabled"


class CheckpointManager(ABC):
    """Writes and reads the checkpoints of one run. Every method is called on all ranks, and fails on all or on none.

    Args:
        directory: The directory of the run's checkpoints.
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
        domain: Domain,
        run_id: str,
        settings: CheckpointSettings,
        step_mode: bool,
        compare: Callable[[Mapping[str, object]], list[str]] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.domain = domain
        self.settings = settings
        self.step_mode = step_mode

        def differences(path: Path) -> list[str]:
            return (
                compare(read_payload(path, sections=["runner", "state"], mmap=True))
                if compare is not None
                else []
            )

        self.checkpoints = CheckpointDirectory(
            self.directory,
            first=self.store_class,
            run_id=run_id,
            settings=settings,
            compare=differences,
        )
        self.store = self.checkpoints.stores[0]
        self._executor = SaveExecutor()
        self._buffers = SnapshotBuffers()
        self._closed = False
        self._said_need = False
        self.copier = SaveCopier()
        """Hears of every save; `danling.remote` puts another one in its place."""
        self.before_save: Callable[[], None] = _nothing
        """Called on rank 0 before a save begins; what it raises refuses the save on all ranks."""
        self.planned_history: Callable[[], int] = int
        """Returns how many checkpoints with a history name the whole run will make; 0 where that is not known."""
        self.after_save: Callable[[Mapping[str, Any]], None] = _nothing
        """Called on rank 0 with the payload of a full state that is on the disk, maybe in the background; it must not communicate."""

    # Saving

    def save_checkpoint(
        self,
        payload: Mapping[str, object],
        *,
        epoch: int,
        global_step: int,
        history: bool = False,
        best: bool = False,
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
        kept = history_name(step_mode=self.step_mode, epoch=epoch, global_step=global_step)
        # `latest` becomes visible last: it is what a restart looks for first.
        asked = {kept: history, "best": best, "latest": True}
        names = [name for name, is_asked in asked.items() if is_asked]
        self._save(payload, names, epoch=epoch, global_step=global_step)

    def export_model(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Write weights only, as `model`; `latest` is left alone. Call on all ranks."""
        self._save(payload, ["model"], epoch=epoch, global_step=global_step)

    @abstractmethod
    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int
    ) -> None:
        """Write a payload under names, now or in the background."""

    def _open_save(
        self, names: list[str], *, needed: int, epoch: int, global_step: int
    ) -> list[Record]:
        """Check that a save can be made, and return its records. Call on rank 0."""
        self.before_save()
        # Logged once, at the first save: a run that keeps all of its history may fill the disk.
        count = 0 if self._said_need or self.settings.keep_latest_k else self.planned_history()
        self._said_need = True
        if count > 1:
            logger.info(
                "%d checkpoints with %s of tensors each will be kept in %s, %s in all; checkpoint.keep_latest_k=3 keeps three.",
                count,
                _as_size(needed),
                self.directory,
                _as_size(count * needed),
            )
        self.checkpoints.open_branch()
        try:
            storage.require_space(self.directory, needed)
        except CheckpointError:
            # A save on this disk is worth more than the copy of an older one.
            given_up = self.copier.drop_pending()
            if not given_up:
                raise
            logger.warning(
                "%s has no room for the next save: %s will not be copied to the object store, and may be removed here.",
                self.directory,
                ", ".join(given_up),
            )
            # What the copier has dropped is not protected any more.
            self._prune()
            storage.require_space(self.directory, needed)
        return self.checkpoints.next_records(names, epoch=epoch, global_step=global_step)

    def _prune(self) -> None:
        self.checkpoints.prune(self.copier.pending())

    def _saved(self, payload: Mapping[str, object], names: Iterable[str]) -> None:
        """Do what follows when a payload is on the disk under its names. Called on rank 0, maybe in the background."""
        self._prune()
        # An export has weights alone.
        if "latest" in names:
            self.after_save(payload)

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
            CheckpointMismatch: If it is in this run's directory and belongs to another run, or has a format that is not known.
        """
        path = self._fetched(source)
        trust = self.settings.trust
        return self.on_all(
            partial(read_payload, path, template=template, sections=sections, trust=trust)
        )

    def _fetched(self, source: str | Path) -> Path:
        """Return the verified file or target of a checkpoint, which every rank can read."""
        # A save in the background may be about to replace what is asked for.
        self.wait()
        if len(set(self.domain.gather_objects(str(source)))) > 1:
            # Copies on several machines, which were compared at the beginning of the run: each rank reads its own.
            return self.on_all(lambda: self.checkpoints.verified(source)[1])
        is_brought, path = self.on_main(lambda: self.checkpoints.verified(source))
        if is_brought:
            self.on_all(lambda: self.checkpoints.bring(source, path))
        return path

    def find_latest(self) -> str | None:
        """Return the newest intact checkpoint of this run's branch, as a source to load; those that are skipped are logged.

        Call on all ranks.
        """
        return self.on_main(self.checkpoints.find_latest)

    def step_of(self, source: str | Path) -> int:
        """Return the committed updates of a checkpoint, without reading it. Call on all ranks."""
        record = self.on_main(lambda: self.checkpoints.describe(source))
        return record.step if record is not None else 0

    def begin(self, source: str | Path) -> None:
        """Note the checkpoint that the run goes on from. Call on all ranks.

        Retention spares it. When it is not the newest, the next save begins a new branch, and what was saved after it is no longer
        part of the run; until then nothing changes on disk.
        """
        self.wait()
        self.checkpoints.continue_from(self.on_main(lambda: self.checkpoints.describe(source)))
        self.checkpoints.release()

    # Ending

    def wait(self) -> None:
        """Wait until everything is written. Call on all ranks.

        Raises:
            CheckpointError: If something could not be.
        """
        self._executor.wait()
        self._surface()

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027
        """Refuse weights that no checkpoint of this kind can hold, with `ValueError`, before anything is trained. No communication."""

    def wait_for_copies(self) -> None:
        """Wait until the last save is copied to the object store, or cannot be, which `close` raises; at most `checkpoint.wait_timeout`.

        The ranks leave together: one that has little to upload would wait for the others in its next collective, which fails after a while.
        """
        if not self.copier.copies:
            return
        timeout = self.settings.wait_timeout
        if self.domain.size == 1:
            self.copier.wait(timeout)
            return
        waiting = threading.Thread(target=self.copier.wait, args=(timeout,), daemon=True)
        waiting.start()
        while any(self.domain.gather_objects(waiting.is_alive())):
            waiting.join(_SECONDS_BETWEEN_SIGNS)

    def maybe_wait_for_staging(self) -> None:  # noqa: B027
        """Do nothing: a save has copied live tensors when it returns."""

    def close(self, timeout: float | None = None) -> None:
        """Write the remaining saves, or give up after `timeout` seconds; complete checkpoints stay as they are. May be called twice.

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
            if error is not None:
                raise self._as_raised(error)
        finally:
            self.copier.close(timeout)
            if self.copier.copies and self.domain.rank == 0 and not self.checkpoints.is_split:
                # What waited for its upload is in the store now. Disks of several machines are pruned together, at the next save.
                self._prune()

    def _end(self, timeout: float | None) -> None:
        if not self._executor.close(timeout):
            logger.warning(
                "A checkpoint was not written within %s seconds and is given up; complete ones are as they were.",
                timeout,
            )

    # What fails on one rank fails on all of them, in the same words

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its value, or raise its error, on all ranks. Call on all ranks."""
        return self.domain.on_first(action, raised_as=self._as_raised)

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; return its value here, or raise the error of any rank on all of them. Call on all ranks."""
        return self.domain.on_all(action, raised_as=self._as_raised)

    def _surface(self) -> None:
        """Raise an error of the background of any rank on all of them."""
        self._agree(self._executor.take_error() or self.copier.take_error())

    def _agree(self, error: BaseException | None) -> None:
        """Raise the error of any rank on all of them."""
        raised = None if error is None else self._as_raised(error)
        self.domain.raise_any(raised)

    def _as_raised(self, error: BaseException) -> Exception:
        """Return the error of a checkpoint that is raised in the place of another one."""
        found: BaseException = error
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            path = Path(error.filename or self.directory)
            found = disk_error("write or read", path, error, free=storage.free_bytes(path))
        if isinstance(found, CheckpointDiskError):
            found = CheckpointDiskError(f"{found} {self.checkpoints.still_good()}")
        elif not isinstance(found, (CheckpointError, ValueError)):
            received = f"{type(error).__name__}: {error}. {self.checkpoints.still_good()}"
            found = CheckpointError(
                f"Expected a checkpoint to be written or read. Received: {received}"
            )
        if found is not error:
            found.__cause__ = error
        return found


class FileCheckpointManager(CheckpointManager):
    """`latest.pth`, `best.pth` and `ckpt-*.pth`, each with its checksums in `*.pth.sha256`.

    A save writes one file and gives it its names by hard links, so that several names cost one write. Only rank 0 accesses
    the disk; it tells all ranks its results and errors. The payload of rank 0 is the one that is written.

    Each file can be read by `torch.load(path, weights_only=True)`.
    """

    saves_on_main_only: ClassVar[bool] = True
    """Whether rank 0 alone can write a state that all ranks have gathered."""
    store_class: ClassVar[type[FileStore]] = FileStore
    store: FileStore

    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int
    ) -> None:
        if self.settings.load_only:
            return
        self._surface()
        # Only rank 0 can fail here, and its error is raised on all of them.
        with self.domain.failing_together(raised_as=self._as_raised):
            if self.domain.rank == 0:
                self._write_or_enqueue(payload, names, epoch, global_step)

    def _write_or_enqueue(
        self, payload: Mapping[str, object], names: list[str], epoch: int, global_step: int
    ) -> None:
        records = self._open_save(
            names, needed=count_bytes(payload), epoch=epoch, global_step=global_step
        )
        if not self.settings.is_async:
            self._write(to_host(payload), records)
            return
        # Before the copy, so that there are at most as many as `SnapshotBuffers` counts.
        self._executor.wait_for_room()
        copied, release = self._buffers.copy(payload)
        is_reliable = names != ["latest"]
        self._executor.submit(
            partial(self._write, copied, records), reliable=is_reliable, release=release
        )

    def prepare_emergency_save(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int
    ) -> Callable[[], bool]:
        """Return what saves a state after a failure of this rank, and returns whether it did. Call on all ranks."""
        return partial(self.save_on_main_only, payload, epoch=epoch, global_step=global_step)

    def save_on_main_only(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int
    ) -> bool:
        """Save a full state as `latest` now, on rank 0, without communication: the other ranks may be in any other code."""
        if self.domain.rank == 0 and not self.settings.load_only:
            self._executor.wait()
            records = self._open_save(
                ["latest"], needed=count_bytes(payload), epoch=epoch, global_step=global_step
            )
            self._write(to_host(payload), records)
        return True

    def _write(self, payload: dict[str, object], records: list[Record]) -> None:
        with self.store.publishing(records) as writer:
            torch.save(payload, writer)  # type: ignore[arg-type]
        names = [record.name for record in records]
        # Before `_saved`, since retention removes what no copier waits for.
        self.copier.saved(Saved.of(records[0], names))
        self._saved(payload, names)


class CollectiveCheckpointManager(CheckpointManager):
    """A manager of targets. Its saves take all ranks, and one whose evaluation failed finds no other: they save before it."""

    store_class: ClassVar[type[TargetStore]] = TargetStore
    store: TargetStore
    saves_on_main_only: ClassVar[bool] = False
    _ahead: object | None = None
    """What the next save takes over from the last one, where that one was made ahead of an evaluation."""

    def prepare_emergency_save(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int
    ) -> Callable[[], bool]:
        """Save a state, and return what says after a failure of this rank whether that save is complete. Call on all ranks."""
        self.save_before_evaluation(payload, epoch=epoch, global_step=global_step)
        return self.is_saved_before_evaluation

    def save_before_evaluation(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int
    ) -> None:
        """Save a state as `latest` before an evaluation; the save after it writes again only what has changed. Call on all ranks."""
        self._save(payload, ["latest"], epoch=epoch, global_step=global_step, ahead=True)

    def is_saved_before_evaluation(self) -> bool:
        """Whether the last save was one ahead and is complete, which is waited for. No communication: may be called on one rank."""
        self._executor.wait()
        return self._ahead is not None

    @abstractmethod
    def _save(
        self,
        payload: Mapping[str, object],
        names: list[str],
        *,
        epoch: int,
        global_step: int,
        ahead: bool = False,
    ) -> None:
        """Write a payload under names, now or in the background; `ahead` of an evaluation, remember what the next save may take over."""

    def _open_target(self, needed: int, epoch: int, global_step: int) -> Record:
        record = self._open_save(["latest"], needed=needed, epoch=epoch, global_step=global_step)[0]
        return replace(record, name=new_target(record.sequence))

    def _is_copier_behind(self, exchange: Callable[[object], list[object]]) -> bool:
        """Whether a save waits to be copied on any rank: they are to copy the same saves. Called on all ranks."""
        # A rank by itself does not ask: its copier replaces the save that waits by the newer one.
        return self.copier.copies and self.domain.size > 1 and any(exchange(self.copier.is_behind))

    def _publish(
        self,
        record: Record,
        names: Sequence[str],
        payload: Mapping[str, object],
        own: Iterable[str],
        *,
        put_off: bool,
    ) -> None:
        """Let names lead to a complete target and prune, on rank 0; tell the copier what this rank has written. On each rank."""
        is_main = self.domain.rank == 0
        if is_main:
            self.store.publish(record.name, names)
        # Before retention, which spares what the copier has yet to copy.
        self.copier.saved(Saved.of(record, names, target=record.name, own=own), put_off=put_off)
        if is_main:
            self._saved(payload, names)

    def _follow(self, sequence: int, exchange: Callable[[object], list[Any]]) -> None:
        """On machines with separate disks, remove the checkpoints that the main process has removed. Called on all ranks."""
        if self.checkpoints.is_split:
            mine = self.store.targets() if self.domain.rank == 0 else None
            kept = exchange(mine)[0]
            if self.checkpoints.follows:
                self.store.follow(sequence, kept)


def _as_size(size: int) -> str:
    unit, name = next(
        ((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u), (1.0, "bytes")
    )
    return f"{size / unit:.3g} {name}"


def _nothing(*_: object) -> None:
    """Do nothing."""
