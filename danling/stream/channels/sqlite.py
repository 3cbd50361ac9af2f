"""The log of a stream in an SQLite database, for processes on one machine."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from danling.utils.files import write_error
from danling.utils.plain import parse_json

from ..protocols import ROOM, RefChannel, SampleRef, StreamEnd
from .rules import Claim, check_kind, check_open, check_part, check_range, check_watermark, stored_end, stored_watermark

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
        self._path = Path(path).absolute()
        self._claim = Claim(_beside(self._path, "owner.json"), _beside(self._path, "trainer.lock"), self.name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _close_before_forks()
        _open_channels.add(self)
        self._open()

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        with self._connected() as database:
            made = database.execute("PRAGMA user_version").fetchone() != (0,)
        if not made:  # asked first, so that a reader never waits for producers
            with self._transaction() as database:
                for statement in _TABLES.split(";"):
                    database.execute(statement)

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        """Path of the database."""
        return self._path

    def append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log; see `RefChannel.append`.

        Raises:
            OSError: If they cannot be written; the log is then as it was before.
        """
        with self._transaction() as database:
            check_open(self.name, _end(database))
            first = place = _published(database)
            for ref in refs:
                row = (place, ref.id, ref.to_json())
                place += database.execute("INSERT OR IGNORE INTO samples VALUES (?, ?, ?)", row).rowcount
            return place - first

    def read(self, start: int, stop: int) -> list[SampleRef]:
        check_range(start, stop)
        with self._connected() as database:
            query = "SELECT ref FROM samples WHERE place >= ? AND place < ? ORDER BY place"
            return [SampleRef.from_json(line) for (line,) in database.execute(query, (start, stop))]

    def holds(self, sample_id: str) -> bool:
        with self._connected() as database:
            return database.execute("SELECT 1 FROM samples WHERE id = ?", (sample_id,)).fetchone() is not None

    def published(self) -> int:
        with self._connected() as database:
            return _published(database)

    def committed(self) -> int:
        with self._connected() as database:
            return _watermark(self.name, database)

    def commit(self, position: int) -> None:
        with self._transaction() as database:
            check_watermark(self.name, position, _published(database))
            if position > _watermark(self.name, database):
                _write_fact(database, "committed", str(position))

    def ended(self) -> StreamEnd | None:
        with self._connected() as database:
            return _end(database)

    def end(self, kind: str = "complete", reason: str = "", *, part: int = 0, parts: int = 1) -> None:
        check_kind(kind)
        with self._transaction() as database:
            done, known = database.execute("SELECT COUNT(*), COALESCE(MAX(parts), 0) FROM parts").fetchone()
            check_part(self.name, part, parts, known)
            if kind == "complete":
                done += database.execute("INSERT OR IGNORE INTO parts VALUES (?, ?)", (part, parts)).rowcount
            if _end(database) is None and (kind != "complete" or done == parts):
                record = {"end": kind, "published": _published(database), "reason": reason}
                _write_fact(database, "end", json.dumps(record))

    def reopen(self) -> None:
        with self._transaction() as database:
            end = _end(database)
            if end is not None and end.kind != "complete":
                database.execute("DELETE FROM facts WHERE name = 'end'")

    def claim(self, run: str) -> bool:
        end = self.ended()
        return self._claim.take(run, complete=end is not None and end.kind == "complete")

    def close(self) -> None:
        self._claim.release()
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connect(self._path)
                yield self._connection
            except sqlite3.DatabaseError as error:
                raise _translated(self._path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as database:
            # Immediate: it waits for other writers here, and what it reads is what it changes.
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise


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


def _published(database: sqlite3.Connection) -> int:
    (last,) = database.execute("SELECT MAX(place) FROM samples").fetchone()
    return 0 if last is None else int(last) + 1


def _fact(database: sqlite3.Connection, name: str) -> str | None:
    found = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if found is None else str(found[0])


def _write_fact(database: sqlite3.Connection, name: str, value: str) -> None:
    database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _end(database: sqlite3.Connection) -> StreamEnd | None:
    text = _fact(database, "end")
    if text is None:
        return None
    try:
        record = parse_json(text)
        return stored_end(record if isinstance(record, dict) else {})
    except ValueError as error:
        raise ValueError(
            f"Expected how a stream ended. Received: {text[:200]!r} ({error}). Bring the file back from a copy, or begin another stream."
        ) from None


def _watermark(name: str, database: sqlite3.Connection) -> int:
    text = _fact(database, "committed") or "0"
    return stored_watermark(name, int(text) if text.isdecimal() and len(text) < 20 else text)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


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
        return OSError(
            errno.EIO,
            f"Expected to read and write {path}. Received: {text}. See to it that its directory can be written.",
        )
    return ValueError(
        f"Expected the log of a stream in {path}. Received: {text}. Bring the file back from a copy, or begin another stream."
    )


_open_channels: weakref.WeakSet[SQLiteChannel] = weakref.WeakSet()
_held_for_fork: list[SQLiteChannel] = []


@cache
def _close_before_forks() -> None:
    """See to it that no connection goes through a fork."""
    os.register_at_fork(before=_disconnect_all, after_in_parent=_let_go, after_in_child=_let_go)


def _disconnect_all() -> None:
    for channel in list(_open_channels):
        channel._lock.acquire()
        _held_for_fork.append(channel)
        channel._disconnect()


def _let_go() -> None:
    while _held_for_fork:
        _held_for_fork.pop()._lock.release()
