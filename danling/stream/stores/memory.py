"""Features in the memory of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ..protocols import FeatureStore, SampleRef
from .objects import (
    check_against,
    check_budget,
    check_sum,
    checksum,
    damaged,
    dense,
    missing,
    nbytes,
    owned,
    same_bytes,
    specs,
    taken,
)


class MemoryStore(FeatureStore):
    """A store for a producer and a trainer in one process, interleaved or in threads.

    Args:
        max_bytes: Bytes of features that it holds at most, no limit where it is left out.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[dict[str, Tensor], str]] = {}
        """Tensors and checksum by name of the object."""
        self._usage = 0
        self._pid = os.getpid()

    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        copy = owned(dense(object_id, tensors))
        written = checksum(object_id, copy)
        with self._locked():
            present = self._objects.get(object_id)
            if present is not None:
                if not same_bytes(present[0], copy):
                    raise taken(object_id, "this store")
                return
            size = nbytes(copy)
            check_budget(object_id, size, self._usage, self.max_bytes)
            self._objects[object_id] = copy, written
            self._usage += size

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        with self._locked():
            found = self._objects.get(ref.object_id)
        if found is None:
            raise missing(ref, "the store in memory")
        tensors = owned(found[0])
        try:
            check_sum(ref.object_id, tensors, found[1])
        except ValueError as error:
            raise damaged(ref, "the store in memory", error) from error
        check_against(ref, specs(tensors), "the store in memory")
        return tensors

    def discard(self, object_ids: Iterable[str]) -> None:
        with self._locked():
            for object_id in object_ids:
                self._usage -= nbytes(self._objects.pop(object_id, ({}, ""))[0])

    def usage(self) -> int:
        with self._locked():
            return self._usage

    def close(self) -> None:
        """Do nothing: the objects stay for other users of the store."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryStore to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a DirectoryStore between processes, such as the workers of a loader."
            )
        with self._lock:
            yield
