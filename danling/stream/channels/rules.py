"""Rules for the log of every stream: refused samples, the run that owns a log, and the process that trains on it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from danling.utils.files import read_text, write_atomically
from danling.utils.locks import FileLock
from danling.utils.plain import parse_json

from ..protocols import StreamEnd

ENDS = ("complete", "failed", "stopped")


def check_open(name: str, end: StreamEnd | None) -> None:
    """Check that samples can be appended."""
    if end is None:
        return
    mend = (
        "A complete log stays as it is: begin another stream."
        if end.kind == "complete"
        else "Call reopen to go on where it ended."
    )
    reason = f": {end.reason}" if end.reason else ""
    raise RuntimeError(
        f"Expected the log of stream {name} to be open. Received: it is {end.kind} after {end.published} samples{reason}. {mend}"
    )


def check_kind(kind: str) -> None:
    """Check the word that says how a log ends."""
    if kind not in ENDS:
        raise ValueError(f"Expected one of {', '.join(ENDS)} as the end of a stream. Received: {kind!r}.")


def stored_watermark(name: str, value: object) -> int:
    """Return the watermark that is stored with a log."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(
            f"Expected a watermark of at least 0 in the log of stream {name}. Received: {value!r}. Bring the log back from a copy."
        )
    return value


def stored_end(record: Mapping[str, object]) -> StreamEnd:
    """Return how a log ended from its own record."""
    kind, published, reason = record.get("end"), record.get("published"), record.get("reason")
    if kind not in ENDS or not isinstance(published, int) or not isinstance(reason, str):
        raise ValueError(f"no end of a stream: {dict(record)!r}")
    return StreamEnd(kind, published, reason)


def check_range(start: int, stop: int) -> None:
    """Check two places in the log."""
    if not 0 <= start <= stop:
        raise ValueError(f"Expected places of samples with 0 <= start <= stop. Received: start={start}, stop={stop}.")


def check_watermark(name: str, position: int, published: int) -> None:
    """Check a watermark."""
    if not 0 <= position <= published:
        raise ValueError(
            f"Expected a watermark between 0 and the {published} samples in the log of stream {name}. Received: {position}. "
            "Resume a run with the log that it was trained on."
        )


def check_owner(name: str, owner: str, run: str) -> None:
    """Check that a live log belongs to a run."""
    if owner and owner != run:
        raise RuntimeError(
            f"Expected the live stream {name} to be read by the run that began it, {owner}. Received: run {run}. "
            "Resume that run, wait until the stream is complete, or begin another stream."
        )


def check_part(name: str, part: int, parts: int, known: int) -> None:
    """Check which of several producers ends."""
    if not 0 <= part < parts:
        raise ValueError(
            f"Expected a part of stream {name} from 0 to {parts - 1}. Received: part={part}, parts={parts}."
        )
    if known not in (0, parts):
        raise ValueError(
            f"Expected all producers of stream {name} to agree about their number. Received: parts={parts}, and {known} by another. "
            "Start each with the same number."
        )


class Claim:
    """The claim of one trainer on a log: a lock that ends with its process, and the run in a file that stays."""

    def __init__(self, owner: Path, lock: Path, name: str) -> None:
        self._owner = owner
        self._lock = FileLock(lock)
        self._pid = os.getpid()
        self._name = name

    def take(self, run: str, *, complete: bool) -> bool:
        """Take the log, and return whether it belongs to this run and this process; see `RefChannel.claim`."""
        if self._pid != os.getpid():
            # A forked child has inherited the object and not the lock.
            self._lock, self._pid = FileLock(self._lock.file), os.getpid()
        if complete and self.owner() not in ("", run):
            return False
        try:
            taken = self._lock.acquire()
        except OSError:
            if complete:  # on a file system that cannot be written, where nothing is freed either
                return False
            raise
        if not taken:
            if complete:
                return False
            raise RuntimeError(
                f"Expected the live stream {self._name} to be read by one trainer at a time. Received: one more, in addition to "
                f"{self._lock.holder}. Wait until that one has ended, or begin another stream."
            )
        owner = self.owner()
        if owner not in ("", run):
            self.release()
            if complete:
                return False
        check_owner(self._name, owner, run)
        if not owner:
            write_atomically(self._owner, json.dumps({"run": run}) + "\n")
        return True

    def owner(self) -> str:
        """Return the run that the log belongs to, empty when it belongs to none."""
        try:
            return str(parse_json(read_text(self._owner))["run"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"Expected the run that the stream {self._name} belongs to. Received: {self._owner}, which names none. Bring it back from "
                "a copy, or remove it."
            ) from None

    def release(self) -> None:
        """Give the log back; it still belongs to the run."""
        self._lock.release()
