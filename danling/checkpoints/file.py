"""Checkpoints in single files, written by one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .base import CheckpointManager
from .file_store import FileStore
from .policy import Record
from .snapshot import count_bytes, to_host


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
        self.on_main(lambda: self._write_or_enqueue(payload, names, epoch, global_step))

    def _write_or_enqueue(self, payload: Mapping[str, object], names: list[str], epoch: int, global_step: int) -> None:
        records = self._open_attempt(names, needed=count_bytes(payload), epoch=epoch, global_step=global_step)
        if not self.settings.is_async:
            self._write(self._prepared(payload)[0], records)
            return
        self._executor.wait_for_room()
        held, release = self._prepared(payload)

        def write() -> None:
            try:
                self._write(held, records)
            finally:
                release()

        self._executor.submit(write, reliable=names != ["latest"], discard=release)

    def save_alone(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> bool:
        """Save a full state as `latest` now, on rank 0, without communication: the other ranks may be in any other code.

        May be called on one rank.

        Args:
            payload: The state, gathered while all ranks were there.
            epoch: Completed epochs.
            global_step: Committed updates.

        Returns:
            Whether it is saved: always `True`, since the other ranks leave it to rank 0.

        Raises:
            CheckpointError: If it cannot be written.
        """
        if self.domain.rank == 0 and not self.settings.load_only:
            self._executor.wait()
            records = self._open_attempt(["latest"], needed=count_bytes(payload), epoch=epoch, global_step=global_step)
            self._write(to_host(payload), records)
        return True

    def _write(self, payload: dict[str, Any], records: list[Record]) -> None:
        self.store.write(lambda writer: torch.save(payload, writer), records)  # type: ignore[arg-type]
        names = [record.name for record in records]
        self._mirrored(records[0], names)
        self._saved(payload, names)
