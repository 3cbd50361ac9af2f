"""The log of a stream as a file of JSON lines, for processes that share a file system."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from danling.utils.files import open_file, read_text, sync_directory, write_all, write_atomically, write_error
from danling.utils.locks import exclusive, shared
from danling.utils.plain import parse_json

from ..protocols import ROOM, RefChannel, SampleRef, StreamEnd
from .rules import Claim, check_kind, check_open, check_part, check_range, check_watermark, stored_end, stored_watermark

_SAMPLE = b'{"id":"'
_AFTER_ID = b'","object":'
_CONTROL = b'{"end":'
_REOPENED = b'{"reopened":'

_FIRST_LOOK_SECONDS = 120.0
"""How long the first look at a log waits for a process that writes, longer than a file server keeps a lock of a machine that has died."""

_LATER_LOOK_SECONDS = 0.5
"""How long later looks wait: each has the lines that the one before has seen; a trainer must hear of signals meanwhile."""


class FileChannel(RefChannel):
    """A log in `log.jsonl` of a directory: a line a sample, and lines that say how it ended and that it goes on.

    Lines are appended and synced under a lock, which keeps other producers out, and readers too: they see an append that is whole, or
    nothing of it. Where a producer hangs in an append, readers go on with the lines they have seen. A line that a killed producer left
    unfinished does not count: readers skip it, and the next producer cuts it off. Readers keep 8 bytes a sample in memory, producers about
    100. The watermark and the run that owns the log are in small files next to it.

    Args:
        path: The directory, which is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Path(path).absolute()
        self._log = self._directory / "log.jsonl"
        self._watermark = self._directory / "committed.json"
        self._claim = Claim(self._directory / "owner.json", self._directory / "trainer.lock", self.name)
        if not self._log.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
            sync_directory(self._directory)
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._offsets = array("Q")
        self._scanned = 0
        self._has_looked = False
        self._end: StreamEnd | None = None
        self._parts = 0
        self._done: set[int] = set()
        self._ids: set[bytes] = set()
        self._indexed = 0

    @property
    def name(self) -> str:
        return str(self._directory)

    @property
    def path(self) -> Path:
        """Directory of the log."""
        return self._directory

    def append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log; see `RefChannel.append`.

        Raises:
            OSError: If they cannot be written; the log is then as it was before.
        """
        with self._writing():
            check_open(self.name, self._end)
            self._index()
            lines: dict[bytes, bytes] = {}
            for ref in refs:
                line = ref.to_json().encode() + b"\n"
                key = _digest(_key(line))
                if key not in lines and key not in self._ids:
                    lines[key] = line
            self._write(b"".join(lines.values()), f"{len(lines)} samples")
            self._ids.update(lines)
            self._indexed += len(lines)
            return len(lines)

    def read(self, start: int, stop: int) -> list[SampleRef]:
        """Return the samples at these places; see `RefChannel.read`.

        Raises:
            ValueError: If the file is damaged.
        """
        check_range(start, stop)
        with self._current():
            if stop > len(self._offsets):
                self._look()
            found = []
            for place, line in enumerate(self._lines(start, min(stop, len(self._offsets))), start):
                try:
                    found.append(SampleRef.from_json(line.decode()))
                except ValueError as error:
                    raise ValueError(f"{error} It is sample {place} of {self._log}, which is damaged.") from error
            return found

    def holds(self, sample_id: str) -> bool:
        with self._current():
            self._look()
            self._index()
            return _digest(json.dumps(sample_id)[1:-1].encode()) in self._ids

    def published(self) -> int:
        with self._current():
            self._look()
            return len(self._offsets)

    def committed(self) -> int:
        try:
            record = parse_json(read_text(self._watermark))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise ValueError(
                f"Expected the watermark of a stream. Received: {self._watermark}: {error}. Bring it back from a copy."
            ) from None
        return stored_watermark(self.name, record.get("committed") if isinstance(record, dict) else record)

    def commit(self, position: int) -> None:
        check_watermark(self.name, position, self.published())
        # Not the lock of those who write: a trainer goes on while one of them hangs in an append.
        with exclusive(self._directory / "committed.lock"):
            if position > self.committed():
                write_atomically(self._watermark, json.dumps({"committed": position}) + "\n")

    def ended(self) -> StreamEnd | None:
        with self._current():
            self._look()
            return self._end

    def end(self, kind: str = "complete", reason: str = "", *, part: int = 0, parts: int = 1) -> None:
        check_kind(kind)
        with self._writing():
            check_part(self.name, part, parts, self._parts)
            records: list[Mapping[str, Any]] = []
            done = self._done | {part} if kind == "complete" else self._done
            if done != self._done:
                records.append({"end": "part", "part": part, "parts": parts})
            if self._end is None and (kind != "complete" or len(done) == parts):
                records.append({"end": kind, "published": len(self._offsets), "reason": reason})
            self._write(b"".join(_record(record) for record in records), "the end of the stream")

    def reopen(self) -> None:
        with self._writing():
            if self._end is not None and self._end.kind != "complete":
                self._write(_record({"reopened": len(self._offsets)}), "that the stream goes on")

    def claim(self, run: str) -> bool:
        end = self.ended()
        return self._claim.take(run, complete=end is not None and end.kind == "complete")

    def close(self) -> None:
        self._claim.release()

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Keep other threads out; a forked child begins anew, since a thread of its parent may have been in the middle of a change."""
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other producers out, with all in memory that they have written, and behind the last whole line."""
        with self._current(), exclusive(self._directory / "lock"):
            self._absorb()
            self._has_looked = True
            if self._log.stat().st_size > self._scanned:
                os.truncate(self._log, self._scanned)  # no writer: a producer was killed in the middle of a line
            yield

    def _write(self, lines: bytes, what: str) -> None:
        if not lines:
            return
        handle = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            write_all(handle, lines)
            os.fsync(handle)
        except OSError as error:
            with suppress(OSError):  # whole lines that stay then are samples, and the next producer cuts off the rest
                os.ftruncate(handle, self._scanned)
            raise write_error(what, self._log, error, room=ROOM) from error
        finally:
            os.close(handle)
        self._absorb()

    def _look(self) -> None:
        """Take in what was appended since the last look, and keep producers out meanwhile."""
        seconds = _LATER_LOOK_SECONDS if self._has_looked else _FIRST_LOOK_SECONDS
        try:
            if self._log.stat().st_size != self._scanned:
                with shared(self._directory / "lock", seconds=seconds):
                    self._absorb()
        except TimeoutError:
            if not self._has_looked:
                raise
        self._has_looked = True

    def _absorb(self) -> None:
        """Take in the whole lines that were appended since the last look. No process writes meanwhile."""
        size = self._log.stat().st_size
        if size < self._scanned:
            raise ValueError(
                f"Expected {self._log} to grow only. Received: {size} bytes after {self._scanned}. "
                "Begin another stream in an empty directory, and resume runs with the log that they were trained on."
            )
        if size == self._scanned:
            return
        # Opened anew each time: a buffer that is kept might hold what a producer has cut off since.
        with open_file(self._log) as file:
            file.seek(self._scanned)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if line.startswith(_SAMPLE):
                    self._offsets.append(self._scanned)
                else:
                    self._note(line)
                self._scanned += len(line)

    def _note(self, line: bytes) -> None:
        """Take in a line that is about the log itself."""
        try:
            record = parse_json(line)
            if line.startswith(_REOPENED):
                self._end = None
            elif not line.startswith(_CONTROL):
                raise ValueError("no line of a stream")
            elif record["end"] == "part":
                self._parts = int(record["parts"])
                self._done.add(int(record["part"]))
            else:
                self._end = stored_end(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected a sample or an end as one line of JSON at byte {self._scanned} of {self._log}. Received: {line[:200]!r} "
                f"({error}). Bring the file back from a copy, or begin another stream in an empty directory."
            ) from error

    def _lines(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the lines of samples."""
        if start >= stop:
            return
        with open_file(self._log) as file:
            file.seek(self._offsets[start])
            while start < stop:
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise ValueError(
                        f"Expected {stop} samples in {self._log}. Received: {start}; it was cut off meanwhile."
                    )
                if line.startswith(_SAMPLE):
                    start += 1
                    yield line

    def _index(self) -> None:
        """Take in the ids of all samples, which readers never need."""
        published = len(self._offsets)
        self._ids.update(_digest(_key(line)) for line in self._lines(self._indexed, published))
        self._indexed = published


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


def _key(line: bytes) -> bytes:
    """Return the id of a sample as its line has it: as JSON, without a quotation mark inside."""
    return line[len(_SAMPLE) :].partition(_AFTER_ID)[0]


def _record(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
