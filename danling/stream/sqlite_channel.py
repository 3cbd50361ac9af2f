"""The log of a stream in an SQLite database: a file, for processes on one machine, or the memory of one process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from danling.utils.files import write_error
from danling.utils.locks import FileLock
from danling.utils.plain import parse_json

from .channel import RefChannel, StreamEnd
from .refs import ROOM, SampleRef

_TABLES = """
CREATE TABLE IF NOT EXISTS samples (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, ref TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (part INTEGER PRIMARY KEY, parts INTEGER NOT NULL);
PRAGMA user_version = 1
"""
_PATIENCE_SECONDS = 60.0


class SQLiteChannel(RefChannel):
    """A log in a database: `samples` with unique ids, `facts` with the watermark and the end.

    Write-ahead logging lets readers continue while a producer writes; every transaction is synced before it counts. The database must
    be on a local file system, since shared memory is a part of it. A connection never goes through a fork: it is closed before, and both
    sides open their own.

    Args:
        path: The file of the database, which is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.name = str(self.path)
        self._owner_file = self.path.with_name(f"{self.path.name}.owner.json")
        self._trainer = FileLock(self.path.with_name(f"{self.path.name}.trainer.lock"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _open_channels.add(self)
        self._open()

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        if self._ask("PRAGMA user_version") == (0,):  # asked first, so that a reader never waits for producers
            with self._writing() as database:
                for statement in _TABLES.split(";"):
                    database.execute(statement)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connect(self.path)
                yield self._connection
            except sqlite3.DatabaseError as error:
                raise _translated(self.path, error) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as database:
            # Immediate: it waits for other writers here, and what it reads is what it changes.
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def _committing(self) -> AbstractContextManager[Any]:
        return self._writing()

    def _ask(self, query: str, *values: object) -> Any:
        """Return the first row of an answer."""
        with self._reading() as database:
            return database.execute(query, values).fetchone()

    def _count(self) -> int:
        return int(self._ask("SELECT COALESCE(MAX(place) + 1, 0) FROM samples")[0])

    def _lines(self, start: int, stop: int) -> Iterator[str]:
        query = "SELECT ref FROM samples WHERE place >= ? AND place < ? ORDER BY place"
        with self._reading() as database:
            for (line,) in database.execute(query, (start, stop)):
                yield line

    def _has(self, sample_id: str) -> bool:
        return self._ask("SELECT 1 FROM samples WHERE id = ?", sample_id) is not None

    def _append(self, refs: Sequence[SampleRef]) -> int:
        first = place = self._count()
        with self._reading() as database:
            for ref in refs:
                row = (place, ref.id, ref.to_json())
                place += database.execute("INSERT OR IGNORE INTO samples VALUES (?, ?, ?)", row).rowcount
        return place - first

    def _fact(self, name: str) -> str:
        found = self._ask("SELECT value FROM facts WHERE name = ?", name)
        return "" if found is None else str(found[0])

    def _write_fact(self, name: str, value: str) -> None:
        self._ask("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)

    def _state(self) -> tuple[StreamEnd | None, int, set[int]]:
        text = self._fact("end")
        try:
            end = StreamEnd.stored(parse_json(text)) if text else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected how a stream ended. Received: {text[:200]!r} ({error}). Bring the file back from a copy, or begin another "
                "stream."
            ) from None
        with self._reading() as database:
            parts = dict(database.execute("SELECT part, parts FROM parts"))
        return end, max(parts.values(), default=0), set(parts)

    def _note(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if "reopened" in record:
                self._ask("DELETE FROM facts WHERE name = 'end'")
            elif record["end"] == "part":
                self._ask("INSERT INTO parts VALUES (?, ?)", record["part"], record["parts"])
            else:
                self._write_fact("end", json.dumps(record))

    def _watermark(self) -> object:
        text = self._fact("committed") or "0"
        return int(text) if text.isdecimal() and len(text) < 20 else text

    def _move_watermark(self, position: int) -> None:
        self._write_fact("committed", str(position))


_NUMBERS = itertools.count(1)


class MemoryChannel(SQLiteChannel):
    """A log for a producer and a trainer in one process, interleaved or in threads: a database in memory.

    Args:
        name: What messages call it. Features in a store are named after it, so that no two logs over one store may have the same; where it
            is left out, each log of this machine has its own.
    """

    def __init__(self, name: str | None = None) -> None:
        self._pid = os.getpid()
        self.name = name or f"memory {self._pid}.{next(_NUMBERS)}"
        self.path = Path(":memory:")
        self._run = ""
        self._open()

    def _take(self, run: str) -> str:
        self._run = self._run or run
        return "" if self._run == run else self._belongs_to(self._run, run)

    def close(self) -> None:
        """Do nothing: the log stays for others that use it."""

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryChannel to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a FileChannel or a SQLiteChannel between processes."
            )
        with super()._reading() as database:
            yield database


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_PATIENCE_SECONDS, isolation_level=None, check_same_thread=False)
    end = time.monotonic() + _PATIENCE_SECONDS
    try:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                break
            except sqlite3.OperationalError as error:
                # SQLite reports a lock at once where two processes turn to the write-ahead log: the timeout does not apply.
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.001)
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _translated(path: Path, error: sqlite3.DatabaseError) -> Exception:
    """Return the error of a database as one of the library; Python 3.10 tells its kind by the message alone."""
    text = str(error)
    if "locked" in text:
        return TimeoutError(
            f"Expected the log of stream {path} to be free within {_PATIENCE_SECONDS:.0f} seconds. Received: {text}. "
            "End the process that holds a transaction open on it."
        )
    if "full" in text:
        return write_error("samples", path, OSError(errno.ENOSPC, text), room=ROOM)
    if "disk I/O" in text or "unable to open" in text or "readonly" in text:
        return write_error("samples", path, OSError(errno.EIO, text))
    return ValueError(
        f"Expected the log of a stream in {path}. Received: {text}. Bring the file back from a copy, or begin another stream."
    )


_open_channels: weakref.WeakSet[SQLiteChannel] = weakref.WeakSet()
_locked_for_fork: list[SQLiteChannel] = []


def _before_fork() -> None:
    """See to it that no connection goes through a fork."""
    for channel in list(_open_channels):
        channel._lock.acquire()
        _locked_for_fork.append(channel)
        channel._disconnect()


def _after_fork_in_parent() -> None:
    while _locked_for_fork:
        _locked_for_fork.pop()._lock.release()


def _after_fork_in_child() -> None:
    for channel in _locked_for_fork:
        channel._trainer = FileLock(channel._trainer.file)  # the parent has it
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
