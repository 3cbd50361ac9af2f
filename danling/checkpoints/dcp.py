"""Writes checkpoints of `torch.distributed.checkpoint`, all ranks together."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.distributed import Domain
from danling.utils.tensors import local_part

from . import storage
from .dcp_files import Reuse, TargetWriter, flatten, save_target, written_by
from .directory import SUMS
from .errors import CheckpointDiskError, CheckpointError
from .manager import CollectiveCheckpointManager, SnapshotBuffers, count_bytes
from .manifest import Record, find_problems, read_manifest
from .writer_process import WriterProcess, meet

logger = logging.getLogger("danling")


@dataclass(frozen=True)
class _Save:
    payload: dict[str, Any]
    release: Callable[[], None]
    record: Record
    names: tuple[str, ...]
    ahead: bool = False
    """Whether the same state is saved once more, with the metrics of an evaluation."""


class TorchDistributedCheckpointManager(CollectiveCheckpointManager):
    """Targets that are written once by all ranks together, and pointer files with the names; see `TargetStore`.

    Every rank passes its own payload: ranks write the DTensors that they hold, one rank writes each value that is
    equal everywhere, and values that differ from rank to rank have a key for each rank. Saves never overlap: two at a time hang.

    A save that may give way to a newer one and finds one in progress waits for the next save, `wait` or `close`.

    The stock `python -m torch.distributed.checkpoint.format_utils dcp_to_torch TARGET FILE` converts a target.
    """

    _ahead: SavedAhead | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        distributed = self.domain.size > 1
        self._background = self.settings.is_async
        self._group: dist.ProcessGroup | None = None
        if distributed and self.settings.dedicated_async_process_group:
            self._group = dist.new_group(backend=self.settings.async_process_group_backend)
        elif distributed and self._background:
            logger.warning(
                "checkpoint.dedicated_async_process_group is off: saves wait until they are written, since collectives of training and "
                "of a background save on one group abort the process."
            )
            self._background = False
        self._process: WriterProcess | None = None
        if self.settings.async_mode == "async_with_pinned_mem" and not self.settings.load_only:
            # Now, and not at the first save: it takes seconds until it is ready, and where it cannot be started that is told at once.
            self._process = self.on_all(WriterProcess)
            self._buffers = SnapshotBuffers(shared=True)
        self._pending: _Save | None = None

    # Saving

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse weights that are made of several tensors, such as quantised ones: torch writes them, and cannot read them again.

        Raises:
            ValueError: If there is such a one.
        """
        for name, weight in weights:
            local = local_part(weight.detach())
            if is_traceable_wrapper_subclass(local):
                raise ValueError(
                    f"Expected weights that a sharded checkpoint can hold. Received: {name}, of the class {type(local).__name__}. Set "
                    "checkpoint.backend='file', which keeps it as it is, or quantize the model after the training."
                )

    def _save(
        self,
        payload: Mapping[str, object],
        names: list[str],
        *,
        epoch: int,
        global_step: int,
        ahead: bool = False,
    ) -> None:
        if self.settings.load_only:
            return
        self._surface()
        busy = any(self.domain.gather_objects(self._executor.busy))
        deferred = busy and names == ["latest"] and not ahead
        if not deferred:
            self._executor.wait()
        self._give_up_pending()
        record = self.on_main(lambda: self._open_target(count_bytes(payload), epoch, global_step))
        copied, release = self.on_all(lambda: self._prepared(payload))
        save = _Save(copied, release, record, tuple(names), ahead)
        if not self._background:
            self.on_all(lambda: self._write(save))
        elif deferred:
            self._pending = save
        else:
            self._submit(save)

    def _submit(self, save: _Save) -> None:
        self._executor.submit(lambda: self._write(save), reliable=True)

    def _write(self, save: _Save) -> None:
        """Write a target together with the other ranks; then, on rank 0, let the names lead to it and prune."""
        # Another process may have another working directory by then.
        path, before = self.store.path(save.record.name).absolute(), self._ahead
        self._ahead = None
        try:
            writer = TargetWriter(path, save.record, reuse=self._reuse(save, before))
            if self._process is None:
                save_target(save.payload, writer, group=self._group, alone=self.domain.size == 1)
            else:
                meet(self._process, self._exchange, rank=self.domain.rank, size=self.domain.size)
                # The copy is in shared memory, so that the process takes it over without another one.
                self._process.write(save.payload, writer)
            if save.ahead:
                self._ahead = SavedAhead(save.record.name, save.record.step, tensor_sums(save.payload))
        except CheckpointException as error:
            self._give_up(save)
            raise _explained(error, path) from None
        except Exception:
            self._give_up(save)
            raise
        finally:
            save.release()
        put_off = self._is_mirror_behind(self._exchange)
        files = () if self.mirror is None else storage.names(path) - {SUMS}
        own = [name for name in files if written_by(name) == self.domain.rank]
        self._publish(save.record, save.names, save.payload, own, put_off=put_off)
        self._follow(save.record.sequence, self._exchange)

    def _reuse(self, save: _Save, before: SavedAhead | None) -> Reuse | None:
        """Return the tensors that the last save has written and that are unchanged on every rank."""
        if before is None or before.step != save.record.step or "latest" not in save.names:
            return None
        target, earlier = self.store.path(before.target), before.sums
        try:
            problems = find_problems(read_manifest(target / SUMS, f"{before.target}/{SUMS}"), target, "size")
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        if problems:
            earlier = {}
        # The contents are compared, so that a tensor that the evaluation has changed, such as a buffer, is saved again.
        sums = tensor_sums(save.payload)
        same = {name for name, value in sums.items() if earlier.get(name) == value}
        ranks = self._exchange((same, sums.keys() - same))
        names = frozenset().union(*(kept for kept, _ in ranks)).difference(*(changed for _, changed in ranks))
        return Reuse(before.target, names) if names else None

    def _give_up(self, save: _Save) -> None:
        if self.domain.rank == 0:
            self.store.give_up(save.record.name)

    def _exchange(self, value: object) -> list[Any]:
        """Gather a value of every rank on all of them, over the group that nothing but saves uses."""
        return (self.domain if self._group is None else Domain(self._group)).gather_objects(value)

    # Ending

    def wait(self) -> None:
        """Wait until everything is written; see `CheckpointManager.wait`."""
        self._executor.wait()
        self._submit_pending()
        self._executor.wait()
        self._surface()

    def _end(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        if self._executor.wait(timeout):
            self._submit_pending()
        else:
            self._give_up_pending()
        super()._end(None if end is None else max(end - time.monotonic(), 0.0))
        if self._process is not None:
            self._process.end()
        if self._group is not None and not self._executor.busy:
            dist.destroy_process_group(self._group)
            self._group = None

    def _submit_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._submit(pending)

    def _give_up_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.release()


def _explained(error: CheckpointException, path: object) -> CheckpointError:
    """Return what went wrong on which ranks, as an error of the disk where it was nothing else."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    kind = CheckpointDiskError if all(isinstance(found, OSError) for found in failures.values()) else CheckpointError
    told = {rank: str(f) if isinstance(f, CheckpointError) else repr(f) for rank, f in failures.items()}
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in told.items())
    return kind(f"Expected {path} to be written. Received: {reasons}")


@dataclass(frozen=True)
class SavedAhead:
    """A target that was written before an evaluation, and the SHA-256 of this rank's part of each tensor in it, by dotted name."""

    target: str
    step: int
    sums: dict[str, str]


def tensor_sums(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256 of this rank's part of each dense tensor of a state, with dtype and shape, by dotted name."""
    sums = {}
    for name, leaf in flatten(payload)[0].items():
        if not isinstance(leaf, Tensor) or local_part(leaf).layout != torch.strided:
            continue
        local = local_part(leaf)
        digest = hashlib.sha256(f"{leaf.dtype} {tuple(leaf.shape)} {tuple(local.shape)}".encode())
        plain = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
        sums[name] = digest.hexdigest()
    return sums
