"""The checkpoint managers: when a save is made, of which copy of the state, in which thread, and which errors all ranks raise.

Last comes the manager of single files. `directory` arranges checkpoints on the disk and finds them.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.distributed import Domain
from danling.utils.devices import pin_shared, pinned_block, pins_memory
from danling.utils.tensors import is_plain_tensor, local_part, with_local_part
from danling.utils.trees import tensors

from . import storage
from .directory import CheckpointDirectory, CheckpointStore, FileStore, TargetStore, new_target
from .errors import CheckpointDiskError, CheckpointError, disk_error
from .manifest import Record, history_name
from .reading import read_payload

logger = logging.getLogger("danling")

T = TypeVar("T")

_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_KEPT = (type(None), torch.dtype, torch.device, torch.Size, *_PLAIN)

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
        mode = section["async_mode"] or ("async" if section["async_enabled"] else "disabled")
        names = [name for name in cls.__dataclass_fields__ if name != "async_mode"]
        return cls(async_mode=mode, **{name: section[name] for name in names})

    @property
    def is_async(self) -> bool:
        """Whether saves are written in the background."""
        return self.async_mode != "disabled"


@dataclass(frozen=True)
class Saved:
    """A save that is complete on the disk.

    Attributes:
        sequence: Number of the save, as `Record.sequence`.
        names: Its names, in the order in which they became visible.
        target: Name of the target; `None` for a single file.
        own: The files of the target that this rank has written, without the manifest.
    """

    sequence: int
    step: int
    names: tuple[str, ...]
    target: str | None = None
    own: tuple[str, ...] = ()

    @property
    def may_give_way(self) -> bool:
        """Whether a newer save may take its place: it is no history, no best and no export."""
        return self.names == ("latest",)


# A copy of a state that later updates do not reach


def convert(value: object, on_tensor: Callable[[Tensor], Tensor], path: str = "") -> Any:
    """Return nested mappings, lists and tuples as dicts, lists and tuples, with `on_tensor` applied to every tensor."""
    if isinstance(value, Tensor):
        return on_tensor(readable(value.detach(), path))
    if isinstance(value, Mapping):
        return {
            _plain(key, path): convert(item, on_tensor, f"{path}.{key}" if path else str(key))
            for key, item in value.items()
        }
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        items = [convert(item, on_tensor, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return {_plain(item, path) for item in value}
    return _plain(value, path)


def readable(tensor: Tensor, path: str = "a tensor") -> Tensor:
    """Return a tensor that a safe reader knows: one of a class of the user's as a plain tensor, where that has all of it."""
    local = local_part(tensor)
    if type(local) is Tensor or type(local) in _registered():
        return tensor
    if is_plain_tensor(local):
        return with_local_part(tensor, local.as_subclass(Tensor))
    kind = type(local).__name__
    raise CheckpointError(
        f"Expected tensors that `torch.load(weights_only=True)` reads. Received: {path} of the class {kind}, which has more than "
        f"values. Register the class in the program with torch.serialization.add_safe_globals([{kind}]), or keep a plain tensor there."
    )


def _registered() -> set[Any]:
    """Return the classes that torch's safe reader knows."""
    return {each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()}


def _plain(value: object, path: str) -> object:
    if type(value) in _KEPT:
        return value
    for kind in _PLAIN:
        # Subclasses such as numpy's float64 and enumerations, which a safe reader does not know.
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"Expected tensors and plain values in a checkpoint. Received: {path}={value!r} ({type(value).__name__}). Save it as a tensor, a "
        "number, a string, or a list or dict of these."
    )


class SnapshotBuffers:
    """Host memory for copies of a state, pinned where they come from an accelerator.

    The buffers of the copy that was released last are kept for the next one, since fresh memory costs several times the copy itself.

    Args:
        shared: Whether another process reads the copies.
        most: How many copies there are at once: one is written, one may wait, and one is made before it takes the place of that.
    """

    def __init__(self, *, shared: bool = False, most: int = 3) -> None:
        self._shared = shared
        self._most = most
        self._spare: dict[Any, list[Tensor]] = {}
        self._sizes: list[int] | None = []
        """Bytes of the buffers of the first copy from an accelerator; `None` once its memory has been logged."""
        self._unpinned = 0

    def copy(self, value: object) -> tuple[Any, Callable[[], None]]:
        """Copy a state, and return what releases its memory; tensors that are one and the same share their copy."""
        spare, self._spare = self._spare, {}
        used: dict[Any, list[Tensor]] = {}
        copies: dict[Any, Tensor] = {}
        devices = set()

        def on_tensor(tensor: Tensor) -> Tensor:
            local = local_part(tensor)
            if is_traceable_wrapper_subclass(local):
                # Such as a weight in 8 bits: it owns no memory, and may not support empty copies.
                return with_local_part(tensor, _with_parts(local, on_tensor))
            if local.layout != torch.strided:
                return tensor.cpu().clone()
            kind = (local.dtype, local.shape, local.stride(), local.device.type)
            key = (local.device, local.data_ptr(), *kind)
            if local.numel() == 0 or key not in copies:
                free = spare.get(kind)
                copies[key] = buffer = free.pop() if free else self._new(local)
                used.setdefault(kind, []).append(buffer)
                buffer.copy_(local, non_blocking=True)
                devices.add(local.device)
            return with_local_part(tensor, copies[key])

        def release() -> None:
            self._spare = used

        copied = convert(value, on_tensor)
        accelerators = [device for device in devices if device.type != "cpu"]
        for device in accelerators:
            torch.accelerator.synchronize(device)
        if accelerators and self._sizes is not None:
            self._log_memory(self._sizes, accelerators[0])
            self._sizes = None
        return copied, release

    def _new(self, tensor: Tensor) -> Tensor:
        can_pin = pins_memory(tensor.device.type)
        # Through empty_like, so that a slice of a large storage does not take all of it along.
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=can_pin and not self._shared)
        is_pinned = can_pin
        if self._shared:
            buffer.share_memory_()  # type: ignore[no-untyped-call]
            is_pinned = can_pin and pin_shared(buffer)
        if self._sizes is not None and tensor.device.type != "cpu":
            self._sizes.append(buffer.nbytes)
            self._unpinned += 0 if is_pinned else buffer.nbytes
        return buffer

    def _log_memory(self, sizes: list[int], device: torch.device) -> None:
        """Log once what the copies take, and where they are not pinned, as the first one shows."""
        if self._unpinned:
            instead = " checkpoint.async_mode='async' pins them." if self._shared and pins_memory(device.type) else ""
            logger.warning(
                "%.1f MB of %.1f MB of a background save are copied from %s to memory of the host that is not pinned, which takes "
                "longer.%s",
                self._unpinned / 1e6,
                sum(sizes) / 1e6,
                device,
                instead,
            )
            return
        # Shared memory is pinned where it is. Other blocks are those of torch's allocator, which keeps them for the process.
        blocks = sizes if self._shared else [pinned_block(size, device.type) for size in sizes]
        most = self._most * sum(blocks)
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        logger.log(
            logging.WARNING if most > of_host / 2 else logging.INFO,
            "Copies for background saves take %.1f MB of pinned memory of the host on each rank: up to %d of %.1f MB. A state has %.1f MB; "
            "torch rounds a block of pinned memory up to a power of two, and keeps it until the process ends.",
            most / 1e6,
            self._most,
            sum(blocks) / 1e6,
            sum(sizes) / 1e6,
        )


def _with_parts(tensor: Tensor, on_part: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that is made of others with something else in the place of these."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: on_part(getattr(tensor, name).detach()) for name in names}
    whole: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return whole


def to_host(value: object) -> Any:
    """Return a state ready to be written at once: on the CPU, and no tensor that drags a larger storage along."""

    def on_tensor(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        if local.device.type != "cpu":
            return with_local_part(tensor, local.cpu())
        if local.layout == torch.strided and local.untyped_storage().nbytes() > local.numel() * local.element_size():
            return with_local_part(tensor, local.clone())
        return tensor

    return convert(value, on_tensor)


def count_bytes(value: object) -> int:
    """Return the bytes that the tensors of a state take, those of sharded ones on all ranks together."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(value))


# In the background


class SaveExecutor:
    """One thread that writes checkpoints, one at a time, in order; nothing that goes wrong is lost.

    One save waits at most. A reliable one is always written: the next `submit` waits until it has begun. Any other gives way to the next
    one.
    """

    def __init__(self) -> None:
        self._next: tuple[Callable[[], None], Callable[[], None], bool] | None = None
        """Of the save that waits: what writes it, what frees its copy, and whether it is reliable."""
        self._changed = threading.Condition()
        self._running = False
        self._ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save waits or is being written."""
        with self._changed:
            return self._running or self._next is not None

    def wait_for_room(self) -> None:
        """Wait until a save can be submitted: before its copy is made, so that copies in memory stay few."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or not self._next[2])

    def submit(self, run: Callable[[], None], *, reliable: bool, release: Callable[[], None]) -> None:
        """Enqueue a save; `release` is called when it is written, has failed, or a newer save has taken its place."""
        if self._ending:
            raise RuntimeError("A checkpoint manager cannot save after close(). Save before it.")
        self.wait_for_room()
        with self._changed:
            dropped, self._next = self._next, (run, release, reliable)
            if self._thread is None:
                # A daemon: a save that hangs must not keep a process alive that close() has given up waiting for.
                self._thread = threading.Thread(target=self._work, name="danling-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if dropped is not None:
            dropped[1]()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ending)
                if self._next is None:
                    return
                run, release, _ = self._next
                self._next, self._running = None, True
                self._changed.notify_all()
            error: BaseException | None = None
            try:
                run()
            except BaseException as raised:  # torch's CheckpointException is no Exception, and none may pass unseen
                error = raised
            release()
            # Not kept while the next one is awaited: they refer to the copy of a whole state.
            del run, release
            with self._changed:
                self._error = self._error or error
                self._running = False
                self._changed.notify_all()

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, once."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is written; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._running, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait, and end the thread; return whether everything was written in time. What has not begun by then is given up."""
        done = self.wait(timeout)
        with self._changed:
            self._ending, self._next = True, None
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join()
        return done


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
            return compare(read_payload(path, sections=["runner", "state"], mmap=True)) if compare is not None else []

        self.checkpoints = CheckpointDirectory(
            self.directory, first=self.store_class, run_id=run_id, settings=settings, compare=differences
        )
        self.store = self.checkpoints.stores[0]
        self._executor = SaveExecutor()
        self._buffers = SnapshotBuffers()
        self._closed = False
        self._said_need = False
        self.mirror: Any = None
        """Copies saves to an object store, on all ranks or on none; see `danling.remote.mirror.RunMirror`."""
        self.before_save: Callable[[], None] = _nothing
        """Called on rank 0 before a save begins; what it raises refuses the save on all ranks."""
        self.planned_history: Callable[[], int] = int
        """Returns how many checkpoints with a history name the whole run will make; 0 where that is not known."""
        self.after_save: Callable[[Mapping[str, Any]], None] = _nothing
        """Called on rank 0 with the payload of a full state that is on the disk, maybe in the background; it must not communicate."""

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
        """Write weights only, as `model`; `latest` is left alone. Call on all ranks."""
        self._save(payload, ["model"], epoch=epoch, global_step=global_step)

    @abstractmethod
    def _save(self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int) -> None:
        """Write a payload under names, now or in the background."""

    def _open_save(self, names: list[str], *, needed: int, epoch: int, global_step: int) -> list[Record]:
        """Check that a save can be made, and return its records. Call on rank 0."""
        self.before_save()
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
        self.checkpoints.open_line()
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
        return self.checkpoints.next_records(names, epoch=epoch, global_step=global_step)

    def _prune(self) -> None:
        self.checkpoints.prune(self.mirror.pending() if self.mirror is not None else frozenset())

    def _mirrored(
        self, record: Record, names: Sequence[str], *, target: str | None = None, own: Iterable[str] = (), put_off: bool
    ) -> None:
        """Tell the mirror of a save, before retention. Called on each rank that has written a part, maybe in the background."""
        if self.mirror is not None:
            saved = Saved(record.sequence, record.step, tuple(names), target, tuple(own))
            self.mirror.saved(saved, put_off=put_off)

    def _saved(self, payload: Mapping[str, object], names: Iterable[str]) -> None:
        """Do what follows when a payload is on the disk under its names. Called on rank 0, maybe in the background."""
        self._prune()
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
        path, trust = self._fetched(source), self.settings.trust
        return self.on_all(partial(read_payload, path, template=template, sections=sections, trust=trust))

    def _fetched(self, source: str | Path) -> Path:
        """Return the verified file or target of a checkpoint, which every rank can read."""
        self.wait()
        if len(set(self.domain.gather_objects(str(source)))) > 1:
            # Copies on several machines, which were compared at the beginning of the run: each rank reads its own.
            return self.on_all(lambda: self.checkpoints.verified(source)[1])
        is_brought, path = self.on_main(lambda: self.checkpoints.verified(source))
        if is_brought:
            self.on_all(lambda: self.checkpoints.bring(source, path))
        return path

    def find_latest(self) -> str | None:
        """Return the newest checkpoint of this run's line that is intact, as a source to load; those that are skipped are logged.

        Call on all ranks.
        """
        return self.on_main(self.checkpoints.find_latest)

    def step_of(self, source: str | Path) -> int:
        """Return the committed updates of a checkpoint, without reading it. Call on all ranks."""
        record = self.on_main(lambda: self.checkpoints.describe(source))
        return record.step if record is not None else 0

    def begin(self, source: str | Path) -> None:
        """Note the checkpoint that the run goes on from. Call on all ranks.

        Retention spares it. When it is not the newest, the next save begins a new line, and what was saved after it is no longer
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
            if self.mirror is not None:
                self.mirror.close(timeout)
                if self.domain.rank == 0 and not self.checkpoints.is_split:
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
        error = self._executor.take_error()
        if error is None and self.mirror is not None:
            error = self.mirror.take_error()
        self._agree(error)

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
            found = CheckpointError(f"Expected a checkpoint to be written or read. Received: {received}")
        if found is not error:
            found.__cause__ = error
        return found


class FileCheckpointManager(CheckpointManager):
    """`latest.pth`, `best.pth` and `ckpt-*.pth`, each with its checksums in `*.pth.sha256`.

    A save writes one file and gives it its names by hard links, so that several names cost one write. Only rank 0 accesses
    the disk; it tells all ranks its results and errors. The payload of rank 0 is the one that is written.

    Each file can be read by `torch.load(path, weights_only=True)`.
    """

    store_class: ClassVar[type[FileStore]] = FileStore
    store: FileStore

    def _save(self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int) -> None:
        if self.settings.load_only:
            return
        self._surface()
        self.on_main(partial(self._write_or_enqueue, payload, names, epoch, global_step))

    def _write_or_enqueue(self, payload: Mapping[str, object], names: list[str], epoch: int, global_step: int) -> None:
        records = self._open_save(names, needed=count_bytes(payload), epoch=epoch, global_step=global_step)
        if not self.settings.is_async:
            self._write(to_host(payload), records)
            return
        self._executor.wait_for_room()
        copied, release = self._buffers.copy(payload)
        is_reliable = names != ["latest"]
        self._executor.submit(partial(self._write, copied, records), reliable=is_reliable, release=release)

    def save_alone(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> bool:
        """Save a full state as `latest` now, on rank 0, without communication: the other ranks may be in any other code."""
        if self.domain.rank == 0 and not self.settings.load_only:
            self._executor.wait()
            records = self._open_save(["latest"], needed=count_bytes(payload), epoch=epoch, global_step=global_step)
            self._write(to_host(payload), records)
        return True

    def _write(self, payload: dict[str, object], records: list[Record]) -> None:
        self.store.write(lambda writer: torch.save(payload, writer), records)  # type: ignore[arg-type]
        names = [record.name for record in records]
        self._mirrored(records[0], names, put_off=False)
        self._saved(payload, names)


class CollectiveCheckpointManager(CheckpointManager):
    """A manager of targets. Its saves take all ranks, and one whose evaluation failed finds no other: they save before it."""

    store_class: ClassVar[type[TargetStore]] = TargetStore
    store: TargetStore
    _ahead: object | None = None
    """What the next save takes over from the last one, where that one was made ahead of an evaluation."""

    def save_ahead(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Save a state as `latest` before an evaluation; the save after it writes again only what has changed. Call on all ranks."""
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

    def _open_target(self, needed: int, epoch: int, global_step: int) -> Record:
        record = self._open_save(["latest"], needed=needed, epoch=epoch, global_step=global_step)[0]
        return replace(record, name=new_target(record.sequence))

    def _is_mirror_behind(self, exchange: Callable[[object], list[object]]) -> bool:
        """Whether a save waits to be copied on any rank: they are to copy the same saves. Called on all ranks."""
        return self.mirror is not None and self.domain.size > 1 and any(exchange(self.mirror.is_behind))

    def _publish(
        self, record: Record, names: Sequence[str], payload: Mapping[str, object], own: Iterable[str], *, put_off: bool
    ) -> None:
        """Let names lead to a complete target and prune, on rank 0; tell the mirror what this rank has written. On each rank."""
        is_main = self.domain.rank == 0
        if is_main:
            self.store.publish(record.name, names)
        self._mirrored(record, names, target=record.name, own=own, put_off=put_off)
        if is_main:
            self._saved(payload, names)

    def _follow(self, sequence: int, exchange: Callable[[object], list[Any]]) -> None:
        """On machines with separate disks, remove the checkpoints that the main process has removed. Called on all ranks."""
        if self.checkpoints.is_split:
            kept = exchange(self.store.targets() if self.domain.rank == 0 else None)[0]
            if self.checkpoints.follows:
                self.store.follow(sequence, kept)


def _as_size(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u), (1.0, "bytes"))
    return f"{size / unit:.3g} {name}"


def _nothing(*_: object) -> None:
    """Do nothing."""
