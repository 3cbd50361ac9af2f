"""The log of a stream in an SQLite database: a file, for processes on one machine, or the memory of one process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from danling.utils.files import write_error
from danling.utils.locks import FileLock

from .channel import RECORDS, RefChannel, StreamEnd
from .refs import LONGEST_LINE, ROOM, SampleRef, parse_checked_json, to_checked_json

_TABLES = """
CREATE TABLE IF NOT EXISTS samples (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, ref TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (part INTEGER PRIMARY KEY, parts INTEGER NOT NULL);
PRAGMA user_version = 1
"""
_OWN_FILES = ("-journal", "-wal", "-shm")
"""Suffixes of the files that SQLite makes for a database."""
_PATIENCE_SECONDS = 60.0
_PART = "part "
"""Begins the name of the fact that a part is complete."""


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
        # Asked first, so that a reader never waits for producers.
        if self._ask("PRAGMA user_version") == (0,):
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
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connect(self.path)
                yield self._connection
            # The second, since the message of SQLite about a damaged file may be no text.
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                raise _translated(self.path, error) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as database:
            # A writer reads too, within its own transaction.
            if database.in_transaction:
                yield database
                return
            # One transaction, so that the number of samples and the end of the log are of one moment.
            with self._transaction(database, "BEGIN"):
                yield database

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        # Immediate: it waits for other writers here, and what it reads is what it changes.
        with self._connected() as database, self._transaction(database, "BEGIN IMMEDIATE"):
            yield database

    @contextmanager
    def _transaction(self, database: sqlite3.Connection, begin: str) -> Iterator[None]:
        database.execute(begin)
        try:
            yield
            database.execute("COMMIT")
        # An interrupt as well: an open transaction would keep all other writers out.
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
        # By the index of places. COUNT would go through all rows at each look.
        return int(self._ask("SELECT COALESCE(MAX(place) + 1, 0) FROM samples")[0])

    def _lines(self, start: int, stop: int) -> Iterator[str]:
        query = "SELECT place, id, ref FROM samples WHERE place >= ? AND place < ? ORDER BY place"
        with self._reading() as database:
            rows = database.execute(query, (start, stop))
            for expected, (place, sample_id, line) in enumerate(rows, start):
                is_text = isinstance(line, str) and isinstance(sample_id, str)
                # The id is in the row for its index, and in the reference: damage may have changed one of them.
                is_whole = is_text and line.startswith(f'{{"id":{json.dumps(sample_id)},"object":')
                if place != expected or not is_whole:
                    raise ValueError(
                        f"Expected sample {expected} in the log of stream {self.name}. Received: row {place} with id {sample_id!r}. The "
                        "log is damaged. Bring the file back from a copy, or begin another stream."
                    )
                yield line

    def _has(self, sample_id: str) -> bool:
        return self._ask("SELECT 1 FROM samples WHERE id = ?", sample_id) is not None

    def _append(self, refs: Sequence[SampleRef]) -> int:
        first = place = self._count()
        with self._reading() as database:
            for ref in refs:
                row = (place, ref.id, ref.to_json(place))
                # An id that is there already adds no row, and takes no place.
                place += database.execute(
                    "INSERT OR IGNORE INTO samples VALUES (?, ?, ?)", row
                ).rowcount
        return place - first

    def _facts(self) -> dict[str, str]:
        """Return the watermark, the end and the parts that are complete, as text by name."""
        with self._reading() as database:
            facts = dict(database.execute("SELECT name, value FROM facts"))
        for name, text in facts.items():
            is_known = name in ("committed", "end") or str(name).startswith(_PART)
            if not is_known or not isinstance(text, str):
                raise self._damaged(f"{name}: {text}", "no fact of a log")
        return facts

    def _write_fact(self, name: str, plain: Mapping[str, Any]) -> None:
        with self._reading() as database:
            database.execute(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, to_checked_json(plain))
            )

    def _state(self) -> tuple[StreamEnd | None, int, set[int]]:
        facts = self._facts()
        with self._reading() as database:
            # Logs of earlier versions have them there.
            parts = dict(database.execute("SELECT part, parts FROM parts"))
        end = None
        for name, text in facts.items():
            try:
                if name == "end":
                    end = StreamEnd.stored(parse_checked_json(text, RECORDS))
                elif name != "committed":
                    record = parse_checked_json(text, RECORDS)
                    if name != f"{_PART}{record['part']}":
                        raise ValueError("it is of another part")
                    parts[record["part"]] = record["parts"]
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(text, error) from None
        return end, max(parts.values(), default=0), set(parts)

    def _damaged(self, received: object, error: object) -> ValueError:
        return ValueError(
            f"Expected how a stream ended. Received: {str(received)[:200]!r} ({error}). Bring the file back from a copy, or begin another "
            "stream."
        )

    def _note(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if "reopened" in record:
                with self._reading() as database:
                    database.execute("DELETE FROM facts WHERE name = 'end'")
            elif record["end"] == "part":
                self._write_fact(f"{_PART}{record['part']}", record)
            else:
                self._write_fact("end", record)

    def _check_damage(self) -> None:
        # The rows are checked when they are read. This is for the index of ids, which decides what a producer makes.
        with self._reading() as database:
            found = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
        if found != ["ok"]:
            raise ValueError(
                f"Expected a sound database as the log of stream {self.name}. Received: {found[0]}. Bring the file back from a copy, or "
                "begin another stream."
            )

    def _watermark(self) -> object:
        text = self._facts().get("committed", "0")
        if text.isdecimal() and len(text) < 20:  # as earlier versions wrote it
            return int(text)
        try:
            return parse_checked_json(text, ()).get("committed")
        except ValueError:
            return text

    def _move_watermark(self, position: int) -> None:
        self._write_fact("committed", {"committed": position})


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
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryChannel to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a FileChannel or a SQLiteChannel between processes."
            )
        with super()._connected() as database:
            yield database


def _connect(path: Path) -> sqlite3.Connection:
    _refuse_other_kinds(path)
    # SQLite would refuse other threads, which the lock of the channel keeps apart.
    connection = sqlite3.connect(
        path, timeout=_PATIENCE_SECONDS, isolation_level=None, check_same_thread=False
    )
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
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_LINE)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_other_kinds(path: Path) -> None:
    """Refuse pipes and devices, which SQLite would wait for without an end, and links in the place of the files that it makes itself."""
    for suffix in ("", *_OWN_FILES):
        file = path.with_name(f"{path.name}{suffix}")
        try:
            found = os.stat(file, follow_symlinks=not suffix)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(
                f"Expected a file, or nothing yet, at {file}, where the log of a stream is written. Received: a link, a directory, a named "
                "pipe, or a device. Move it away."
            )
        if found.st_nlink > 1:
            raise ValueError(
                f"Expected the log of a stream to have one name. Received: {file}, a file with {found.st_nlink} names (hard links), which "
                "would be changed under all of them. Copy the file, and move the copy to its place."
            )


def _translated(path: Path, error: Exception) -> Exception:
    """Return the error of a database as one of the library."""
    text = str(error)
    # Extended codes, such as that of a failed fsync, have the kind in their lowest byte.
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TimeoutError(
            f"Expected the log of stream {path} to be free within {_PATIENCE_SECONDS:.0f} seconds. Received: {text}. "
            "End the process that holds a transaction open on it."
        )
    if kind == sqlite3.SQLITE_FULL:
        return write_error("samples", path, OSError(errno.ENOSPC, text), room=ROOM)
    if kind in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return write_error("samples", path, OSError(errno.EIO, text))
    return ValueError(
        f"Expected the log of a stream in {path}. Received: {text}. Bring the file back from a copy, or begin another stream."
    )


_open_channels: weakref.WeakSet[SQLiteChannel] = weakref.WeakSet()
_locked_for_fork: list[SQLiteChannel] = []


def _before_fork() -> None:
    """See to it that no connection goes through a fork."""
    for channel in list(_open_channels):
        # A thread may be in the middle of a transaction, whose end is waited for.
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


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
