"""The manager of sharded checkpoints: when all ranks write a target together, and which tensors of an earlier one they keep."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.distributed import Domain
from danling.utils.tensors import local_part

from . import storage
from .dcp_index import flatten
from .dcp_target import TargetWriter, save_target, written_by
from .errors import CheckpointDiskError, CheckpointError
from .manager import CollectiveCheckpointManager
from .manifest import Record, find_problems, read_manifest
from .snapshot import SnapshotBuffers, count_bytes, to_host
from .target_store import SUMS
from .writer_process import Address, WriterProcess

logger = logging.getLogger("danling")


@dataclass(frozen=True)
class SavedAhead:
    """A target that was written before an evaluation, and the SHA-256 of this rank's part of each tensor in it, by dotted name."""

    target: str
    step: int
    sums: dict[str, str]


class TorchDistributedCheckpointManager(CollectiveCheckpointManager):
    """Targets that are written once by all ranks together, and pointer files with the names; see `TargetStore`.

    Every rank passes its own payload: ranks write the DTensors that they hold, one rank writes each value that is
    equal everywhere, and values that differ from rank to rank have a key for each rank. Saves never overlap, since two at a time
    hang: one that finds another in progress waits until that is written.

    The stock `python -m torch.distributed.checkpoint.format_utils dcp_to_torch TARGET FILE` converts a target.
    """

    _ahead: SavedAhead | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        distributed = self.domain.size > 1
        self._background = self.settings.is_async
        self._group: dist.ProcessGroup | None = None
        ranks = self.domain
        if distributed and self.settings.dedicated_async_process_group:
            self._group = dist.new_group(backend=self.settings.async_process_group_backend)
            ranks = Domain(self._group)
        elif distributed and self._background:
            logger.warning(
                "checkpoint.dedicated_async_process_group is off: saves wait until they are written, since collectives of training and "
                "of a background save on one group abort the process."
            )
            self._background = False
        self._exchange = ranks.gather_objects
        """Gathers a value of every rank on all of them, over the group that nothing but saves uses."""
        # Saves never overlap, so there is one copy at a time.
        self._buffers = SnapshotBuffers(most=1)
        self._process: WriterProcess | None = None
        if (
            self._background
            and self.settings.async_mode == "async_with_pinned_mem"
            and not self.settings.load_only
        ):
            # Now, and not at the first save: it takes seconds until it is ready, and where it cannot be started that is told at once.
            self._process = self.on_all(WriterProcess)
            self._buffers = SnapshotBuffers(shared=True, most=1)
            self._meeting = self.on_main(self._open_store) if distributed else None
            self._meetings = 0

    def _open_store(self) -> Address:
        """Open the store over which the processes of all ranks meet, and return where it is."""
        host = os.environ.get("MASTER_ADDR") or socket.getfqdn()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, int(self._store.port)

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
        # What failed in the background ends the run here, and before a new target is opened.
        self._executor.wait()
        self._surface()
        record = self.on_main(lambda: self._open_target(count_bytes(payload), epoch, global_step))
        if not self._background:
            plain = self.on_all(lambda: to_host(payload))
            self.on_all(lambda: self._write(plain, record, names, ahead))
            return
        # A rank that cannot copy keeps all of them from writing, which takes all.
        copied, release = self.on_all(lambda: self._buffers.copy(payload))
        self._executor.submit(
            partial(self._write, copied, record, names, ahead), reliable=True, release=release
        )

    def _write(
        self, payload: dict[str, object], record: Record, names: list[str], ahead: bool
    ) -> None:
        """Write a target together with the other ranks; then, on rank 0, let the names lead to it and prune."""
        # Another process may have another working directory by then.
        path = self.store.path(record.name).absolute()
        before = self._ahead
        self._ahead = None
        try:
            writer = TargetWriter(path, record)
            if before is not None and before.step == record.step and "latest" in names:
                writer.reuse(before.target, self._unchanged(payload, before))
            if self._process is None:
                save_target(payload, writer, group=self._group, alone=self.domain.size == 1)
            else:
                rank, size = self.domain.rank, self.domain.size
                if not all(self._exchange(self._process.is_ready)):
                    self._meetings += 1
                    # One that dies as it starts is told on all ranks: the others would wait for it.
                    problems = [
                        problem
                        for problem in self._exchange(self._process.renew(__name__))
                        if problem
                    ]
                    if problems:
                        raise CheckpointError(problems[0])
                    self._process.join(self._meeting, self._meetings, rank=rank, size=size)
                # The copy is in shared memory, so that the process takes it over without another one.
                self._process.write(partial(save_target, alone=size == 1), payload, writer)
            if ahead:
                self._ahead = SavedAhead(record.name, record.step, tensor_sums(payload))
        except BaseException as error:
            if self.domain.rank == 0:
                self.store.give_up(record.name)
            if isinstance(error, CheckpointException):
                raise _explained(error, path) from None
            raise
        put_off = self._is_copier_behind(self._exchange)
        # Each rank uploads what it has written: it need not see the disks of the others.
        files = storage.names(path) - {SUMS} if self.copier.copies else ()
        own = [name for name in files if written_by(name) == self.domain.rank]
        self._publish(record, names, payload, own, put_off=put_off)
        self._follow(record.sequence, self._exchange)

    def _unchanged(self, payload: dict[str, object], before: SavedAhead) -> frozenset[str]:
        """Return the tensors that the last save has written and that are unchanged on every rank."""
        target, earlier = self.store.path(before.target), before.sums
        try:
            problems = find_problems(
                read_manifest(target / SUMS, f"{before.target}/{SUMS}"), target, "size"
            )
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        # The contents are compared, so that a tensor that the evaluation has changed, such as a buffer, is saved again.
        sums = tensor_sums(payload)
        same = {name for name, value in sums.items() if not problems and earlier.get(name) == value}
        ranks = self._exchange((same, sums.keys() - same))
        # A tensor that one rank has changed is written by all: its parts are one entry of the index.
        kept: set[str] = set().union(*(same for same, _ in ranks))
        return frozenset(kept.difference(*(changed for _, changed in ranks)))

    def _end(self, timeout: float | None) -> None:
        super()._end(timeout)
        if self._process is not None:
            self._process.end()
        # A save that was given up may still be in a collective of the group.
        if self._group is not None and not self._executor.busy:
            dist.destroy_process_group(self._group)
            self._group = None


def _explained(error: CheckpointException, path: object) -> CheckpointError:
    """Return what went wrong on which ranks, as an error of the disk where it was nothing else."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    kind = (
        CheckpointDiskError
        if all(isinstance(found, OSError) for found in failures.values())
        else CheckpointError
    )
    texts = {}
    for rank, failure in failures.items():
        texts[rank] = str(failure) if isinstance(failure, CheckpointError) else repr(failure)
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return kind(f"Expected {path} to be written. Received: {reasons}")


def tensor_sums(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256 of this rank's part of each dense tensor of a state, with dtype and shape, by dotted name."""
    sums = {}
    for name, leaf in flatten(payload)[0].items():
        if not isinstance(leaf, Tensor) or local_part(leaf).layout != torch.strided:
            continue
        local = local_part(leaf)
        digest = hashlib.sha256(f"{leaf.dtype} {tuple(leaf.shape)} {tuple(local.shape)}".encode())
        # Through bytes: NumPy has no bfloat16.
        plain = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
        sums[name] = digest.hexdigest()
    return sums
