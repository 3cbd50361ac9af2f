"""The log of a stream as a file of JSON lines, for processes that share a file system."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from danling.utils.files import (
    open_file,
    read_text,
    refuse_link,
    sync_directory,
    write_all,
    write_atomically,
    write_error,
)
from danling.utils.locks import FileLock, exclusive, shared

from .channel import RECORDS, RefChannel, StreamEnd
from .refs import LONGEST_LINE, ROOM, SampleRef, has_checksum, parse_checked_json, to_checked_json

# A link of this name is refused, and a pipe of this name does not make the open wait for a reader.
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
# Lines are told apart by their first bytes, unparsed: `SampleRef.to_json` must keep this order.
_SAMPLE, _AFTER_ID = b'{"id":', b',"object":'

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
        self.path = Path(path).absolute()
        self.name = str(self.path)
        self._log = self.path / "log.jsonl"
        self._owner_file = self.path / "owner.json"
        refuse_link(self._log)
        if not self._log.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._log, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o666))
            sync_directory(self.path)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._trainer = FileLock(self.path / "trainer.lock")
        self._lock = threading.RLock()
        self._offsets = array("Q")
        self._scanned = 0
        self._has_looked = False
        self._end: StreamEnd | None = None
        self._parts = 0
        self._done: set[int] = set()
        self._ids: set[bytes] = set()
        self._indexed = 0

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Keep other threads out; a forked child begins anew, since a thread of its parent may have been in the middle of a change."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Take in what was appended since the last look, and keep producers out meanwhile."""
        with self._current():
            seconds = _LATER_LOOK_SECONDS if self._has_looked else _FIRST_LOOK_SECONDS
            try:
                if self._log.stat().st_size != self._scanned:
                    with shared(self.path / "lock", seconds=seconds):
                        self._absorb()
            except TimeoutError:
                # A producer hangs: the lines that were seen before are still whole.
                if not self._has_looked:
                    raise
            self._has_looked = True
            yield

    def read(self, start: int, stop: int) -> list[SampleRef]:
        """Return samples; see `RefChannel.read`. Those that were seen before are read at once, whatever a producer does meanwhile."""
        with self._current():
            if 0 <= start <= stop <= len(self._offsets):
                found = list(self._parsed(start, stop))
                if len(found) == stop - start:
                    return found
        return super().read(start, stop)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other producers out, with all in memory that they have written, and behind the last whole line."""
        with self._current(), exclusive(self.path / "lock"):
            self._absorb()
            self._has_looked = True
            if self._log.stat().st_size > self._scanned:
                # No writer: a producer was killed in the middle of a line.
                handle = self._opened_to_write()
                try:
                    os.ftruncate(handle, self._scanned)
                finally:
                    os.close(handle)
            yield

    def _committing(self) -> AbstractContextManager[None]:
        # Not the lock of those who write: a trainer goes on while one of them hangs in an append.
        return exclusive(self.path / "committed.lock")

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
            while line := file.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    raise ValueError(
                        f"Expected lines of at most {LONGEST_LINE:,} bytes in {self._log}. Received: a longer one at byte {self._scanned}. "
                        "Bring the file back from a copy, or begin another stream in an empty directory."
                    )
                if not line.endswith(b"\n"):
                    break
                if line.startswith(_SAMPLE):
                    self._offsets.append(self._scanned)
                else:
                    self._absorb_record(line)
                self._scanned += len(line)

    def _absorb_record(self, line: bytes) -> None:
        """Take in a line that is about the log itself."""
        try:
            record = parse_checked_json(line, RECORDS)
            if "reopened" in record:
                self._end = None
            elif record["end"] == "part":
                self._parts = int(record["parts"])
                self._done.add(int(record["part"]))
            else:
                self._end = StreamEnd.stored(record)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"Expected a sample or an end as one line of JSON at byte {self._scanned} of {self._log}. Received: {line[:200]!r} "
                f"({error}). Bring the file back from a copy, or begin another stream in an empty directory."
            ) from error

    def _count(self) -> int:
        return len(self._offsets)

    def _lines(self, start: int, stop: int) -> Iterator[bytes]:
        if start < min(stop, len(self._offsets)):
            with open_file(self._log) as file:
                file.seek(self._offsets[start])
                samples = (line for line in file if line.startswith(_SAMPLE))
                yield from islice(samples, min(stop, len(self._offsets)) - start)

    def _has(self, sample_id: str) -> bool:
        self._index()
        return _digest(json.dumps(sample_id).encode()) in self._ids

    def _index(self) -> None:
        """Take in the ids of all samples, which readers never need."""
        for place, line in enumerate(self._lines(self._indexed, len(self._offsets)), self._indexed):
            try:
                has_checksum(line)
            except ValueError as error:
                raise ValueError(
                    f"Expected sample {place} of {self._log} as it was written. Received: {line[:200]!r} ({error}). Bring the file back "
                    "from a copy, or begin another stream in an empty directory."
                ) from error
            self._ids.add(_digest(line[len(_SAMPLE) :].partition(_AFTER_ID)[0]))
        self._indexed = len(self._offsets)

    def _append(self, refs: Sequence[SampleRef]) -> int:
        self._index()
        lines: dict[bytes, str] = {}
        for ref in refs:
            key = _digest(json.dumps(ref.id).encode())
            if key not in self._ids:
                # A sample that is there twice in one call counts once.
                lines.setdefault(key, ref.to_json(self._count() + len(lines)) + "\n")
        self._write("".join(lines.values()), f"{len(lines)} samples")
        self._ids.update(lines)
        self._indexed += len(lines)
        return len(lines)

    def _state(self) -> tuple[StreamEnd | None, int, set[int]]:
        return self._end, self._parts, self._done

    def _note(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines = (to_checked_json(record) + "\n" for record in records)
        self._write("".join(lines), "how the stream ended")

    def _write(self, lines: str, what: str) -> None:
        if not lines:
            return
        handle = self._opened_to_write()
        try:
            write_all(handle, lines.encode())
            os.fsync(handle)
        except OSError as error:
            # Whole lines that stay in spite of it are samples, and the next producer cuts off the rest.
            with suppress(OSError):
                os.ftruncate(handle, self._scanned)
            raise write_error(what, self._log, error, room=ROOM) from error
        finally:
            os.close(handle)
        self._absorb()

    def _opened_to_write(self) -> int:
        """Return a descriptor of the log, which must have no other name: what is written would be in a file of another place too."""
        handle = os.open(self._log, os.O_WRONLY | os.O_APPEND | _FLAGS)
        names = os.fstat(handle).st_nlink
        if names <= 1:
            return handle
        os.close(handle)
        raise ValueError(
            f"Expected the log of a stream to have one name. Received: {self._log}, a file with {names} names (hard links), which would be "
            "changed under all of them. Copy the file, and move the copy to its place."
        )

    def _check_damage(self) -> None:
        self._index()

    def _watermark(self) -> object:
        file = self.path / "committed.json"
        try:
            record = parse_checked_json(read_text(file), ({"committed"},))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise ValueError(
                f"Expected the watermark of a stream. Received: {file}: {error}. Bring it back from a copy."
            ) from None
        return record.get("committed")

    def _move_watermark(self, position: int) -> None:
        write_atomically(
            self.path / "committed.json", to_checked_json({"committed": position}) + "\n"
        )


def _digest(sample_id: bytes) -> bytes:
    """Return the key of a sample in the index, from its id as JSON."""
    return blake2b(sample_id, digest_size=16).digest()
