"""The log of a stream in the memory of one process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..protocols import SampleRef, StreamEnd
from .rules import check_kind, check_open, check_owner, check_part, check_range, check_watermark

_NUMBERS = itertools.count(1)


class MemoryChannel:
    """A log for a producer and a trainer in one process, interleaved or in threads.

    Args:
        name: What messages call it. Features in a store are named after it, so that no two logs over one store may have the same; where it
            is left out, each log of this machine has one of its own.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or f"memory {os.getpid()}.{next(_NUMBERS)}"
        self._lock = threading.Lock()
        self._refs: list[SampleRef] = []
        self._ids: set[str] = set()
        self._committed = 0
        self._end: StreamEnd | None = None
        self._parts = 0
        self._done: set[int] = set()
        self._owner = ""
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """What messages call the channel."""
        return self._name

    def append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log; see `RefChannel.append`."""
        with self._locked():
            check_open(self._name, self._end)
            before = len(self._refs)
            for ref in refs:
                if ref.id not in self._ids:
                    self._ids.add(ref.id)
                    self._refs.append(ref)
            return len(self._refs) - before

    def read(self, start: int, stop: int) -> list[SampleRef]:
        """Return the samples at these places; see `RefChannel.read`."""
        check_range(start, stop)
        with self._locked():
            return self._refs[start:stop]

    def holds(self, sample_id: str) -> bool:
        """Return whether a sample is in the log."""
        with self._locked():
            return sample_id in self._ids

    def published(self) -> int:
        """Return the number of samples in the log."""
        with self._locked():
            return len(self._refs)

    def committed(self) -> int:
        """Return the watermark."""
        with self._locked():
            return self._committed

    def commit(self, position: int) -> None:
        """Move the watermark; see `RefChannel.commit`."""
        with self._locked():
            check_watermark(self._name, position, len(self._refs))
            self._committed = max(self._committed, position)

    def ended(self) -> StreamEnd | None:
        """Return how the log ended, `None` while it is open."""
        with self._locked():
            return self._end

    def end(self, kind: str = "complete", reason: str = "", *, part: int = 0, parts: int = 1) -> None:
        """End the log, or the part of one producer; see `RefChannel.end`."""
        check_kind(kind)
        with self._locked():
            check_part(self._name, part, parts, self._parts)
            self._parts = parts
            if kind == "complete":
                self._done.add(part)
            if self._end is None and (kind != "complete" or len(self._done) == parts):
                self._end = StreamEnd(kind, len(self._refs), reason)

    def reopen(self) -> None:
        """Go on after a failure or a stop; see `RefChannel.reopen`."""
        with self._locked():
            if self._end is not None and self._end.kind != "complete":
                self._end = None

    def claim(self, run: str) -> bool:
        """Take the log for one run; see `RefChannel.claim`."""
        with self._locked():
            if self._end is None or self._end.kind != "complete":
                check_owner(self._name, self._owner, run)
            self._owner = self._owner or run
            return self._owner == run

    def close(self) -> None:
        """Do nothing: the log stays for whoever else holds it."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryChannel to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a FileChannel or a SQLiteChannel between processes."
            )
        with self._lock:
            yield
