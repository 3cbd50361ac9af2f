"""The log of a stream in the memory of one process."""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .rules import check_owner
from .sqlite import SQLiteChannel

_NUMBERS = itertools.count(1)


class MemoryChannel(SQLiteChannel):
    """A log for a producer and a trainer in one process, interleaved or in threads: a database in memory.

    Args:
        name: What messages call it. Features in a store are named after it, so that no two logs over one store may have the same; where it
            is left out, each log of this machine has its own.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or f"memory {os.getpid()}.{next(_NUMBERS)}"
        self._path = Path(":memory:")
        self._owner = ""
        self._pid = os.getpid()
        self._open()

    @property
    def name(self) -> str:
        return self._name

    def claim(self, run: str) -> bool:
        end = self.ended()
        if end is None or end.kind != "complete":
            check_owner(self._name, self._owner, run)
        self._owner = self._owner or run
        return self._owner == run

    def close(self) -> None:
        """Do nothing: the log stays for others that use it."""

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryChannel to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a FileChannel or a SQLiteChannel between processes."
            )
        with super()._connected() as database:
            yield database
