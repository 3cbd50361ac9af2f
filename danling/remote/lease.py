"""One writer for each run in a store: an object that says who writes, and until when.

The object `lock` is created where there is none, and replaced only by the process that has read it last; both are conditions that the store
checks. Some stores ignore them, which is found out at the start: then nothing keeps two writers apart but the run's id, and that is said.

Whether a lease has run out is told by the store's own clock: when the store received the lock, against when it receives an object that
is put now. The clocks of the machines do not matter.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from danling.utils.plain import parse_json

from .store import (
    RemoteConflict,
    RemoteDenied,
    RemoteError,
    RemoteExists,
    RemoteMissing,
    RemoteStore,
    RemoteUnavailable,
    Tag,
)

CREATE, REPLACE = "If-None-Match", "If-Match"
"""The conditions, as S3 calls them."""


def unkept(store: RemoteStore, key: str) -> str | None:
    """Return the first condition that a store does not keep to: to create an object only once, and to replace only the expected one.

    Some stores compare the tag of an object without its quotes, such as the gateway of Ceph 16; a store that is found to do so is asked
    in this way from then on.
    """

    # Each put has other contents, by which a request whose answer was lost is told from another's.
    def content() -> bytes:
        return Writer.me(SECONDS).text()

    def is_replaced(tag: Tag) -> bool:
        try:
            store.put_if_match(key, content(), tag)
        except (RemoteDenied, RemoteUnavailable):
            raise
        except RemoteError:  # a conflict, or a store that knows no such request
            return False
        return True

    with _removed(store, key):
        tag = store.put_if_absent(key, content())
        with suppress(RemoteExists):
            store.put_if_absent(key, content())
            return CREATE
        for bare in (False, True):
            store.bare_tags = bare
            if is_replaced(tag):
                # By now the tag is an old one: a store that replaces again compares nothing.
                if not is_replaced(tag):
                    return None
                break
        store.bare_tags = False
        return REPLACE


def trials(store: RemoteStore) -> dict[str, Callable[[], tuple[str, str]]]:
    """Return what a run asks of a store, by name: calls that return `ok`, `failed` or `absent` and a detail, or raise `RemoteError`.

    They leave nothing in the store.
    """
    prefix = f".danling-probe-{uuid.uuid4().hex}"
    key = f"{prefix}/small"
    content = Writer.me(SECONDS).text()

    def objects() -> tuple[str, str]:
        with _removed(store, key):
            store.put(key, content)
            if store.get(key) != content:
                return "failed", "other bytes came back than were put"
            if [entry.key for entry in store.list(prefix)] != [key]:
                return "failed", "a listing does not have what was put"
            store.delete(key)
            if any(store.list(prefix)):
                return "failed", "what was deleted is still there"
        return "ok", "put, get, list, delete"

    def conditions() -> tuple[str, str]:
        missing = unkept(store, f"{prefix}/lock")
        if missing is None:
            return "ok", f"{CREATE}, {REPLACE}: one process writes a run"
        return "absent", f"it does not keep to {missing}: two writers of a run are not kept apart"

    def clock() -> tuple[str, str]:
        skew = (datetime.now(UTC) - _now_there(store, key)).total_seconds()
        detail = (
            f"this machine is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store"
        )
        if abs(skew) > _LARGEST_SKEW_SECONDS:
            return (
                "failed",
                f"{detail}, which refuses requests from about 15 minutes on: set the clock",
            )
        return "ok", detail

    return {"objects": objects, "conditions": conditions, "clock": clock}


@contextmanager
def _removed(store: RemoteStore, key: str) -> Iterator[None]:
    """Remove an object at the end, whatever happens."""
    try:
        yield
    finally:
        with suppress(RemoteError):
            store.delete(key)


logger = logging.getLogger("danling")

SECONDS = 60.0
"""How long a lease holds after it was renewed last."""

_RENEWALS = 4
"""How often it is renewed in that time."""

_LONGEST_SECONDS = 3600.0
"""A lease that claims to hold longer is none: a file must not make a start wait for ever."""
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_PROBE = ".probe-"
_LARGEST_SKEW_SECONDS = 300.0


@dataclass(frozen=True)
class Writer:
    """Who writes."""

    token: str
    host: str
    machine: str
    pid: int
    born: str
    seconds: float

    @classmethod
    def me(cls, seconds: float) -> Writer:
        """Return what describes this process."""
        return cls(
            uuid.uuid4().hex,
            socket.gethostname(),
            _machine(),
            os.getpid(),
            _born(os.getpid()),
            seconds,
        )

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Writer | None:
        """Read what `text` returns; `None` where it is something else."""
        try:
            found = parse_json(content)
            writer = cls(**{name: kind(found[name]) for name, kind in _FIELDS.items()})
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
        return writer if 0 < writer.seconds <= _LONGEST_SECONDS else None

    @property
    def runs(self) -> bool | None:
        """Whether the process runs; `None` where this process cannot see it."""
        if not self.machine or self.machine != _machine():
            return None
        # Numbers of processes come again, with another time of birth.
        return _born(self.pid) == self.born


_FIELDS = {"token": str, "host": str, "machine": str, "pid": int, "born": str, "seconds": float}


def _machine() -> str:
    # Of containers on one machine, each numbers its processes by itself.
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    try:
        # The name of the program, which is in parentheses, may have spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # State and start time (proc(5)). A zombie has ended.
    return "" if fields[0] in "ZX" else fields[19]


class Lease:
    """The right to write a run in a store."""

    def __init__(
        self, store: RemoteStore, key: str, *, seconds: float = SECONDS, again: bool = False
    ) -> None:
        self.store = store
        self.key = key
        self.seconds = seconds
        self._again = again
        self._run = f"{store.url}/{key.rpartition('/')[0]}"
        self._tag: Tag | None = None
        self._unanswered: bytes | None = None
        self._error: RemoteError | None = None
        self._renewed = 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_exclusive = False
        """Whether the store keeps two writers apart."""

    def acquire(self) -> None:
        """Become the writer, and stay it until `release`. Waits for one that has gone silent, as long as its lease holds."""
        condition = unkept(self.store, _probe(self.key))
        self.is_exclusive = condition is None
        remove_probes(self.store, self.key)
        if condition is not None:
            logger.warning(
                "%s does not keep two writers apart: it ignores the condition %s. Make sure that no other process writes this run.",
                self.store.url,
                condition,
            )
            return
        waits: Tag | None = None
        while True:
            with suppress(RemoteExists):
                self._tag = self.store.put_if_absent(self.key, Writer.me(self.seconds).text())
                break
            try:
                content, tag = self.store.get_tagged(self.key)
                # For how many seconds it was not renewed, by the clock of the store.
                age = (
                    _now_there(self.store, self.key) - self.store.head(self.key).modified
                ).total_seconds()
            except RemoteMissing:
                continue
            holder = Writer.parse(content)
            follows = (
                self._again
                and holder is not None
                and bool(holder.runs)
                and holder.pid == os.getpid()
            )
            # Replaced, not deleted and created: of several processes that see the same, one succeeds.
            if holder is None or holder.runs is False or age > holder.seconds or follows:
                with suppress(RemoteConflict, RemoteMissing):
                    self._tag = self.store.put_if_match(
                        self.key, Writer.me(self.seconds).text(), tag
                    )
                    break
                continue
            if waits is None and not holder.runs:
                waits = tag
                logger.info(
                    "%s/%s is leased by process %d on %s, which may be gone: waiting until its lease ends, in %.0f s.",
                    self.store.url,
                    self.key,
                    holder.pid,
                    holder.host,
                    max(holder.seconds - age, 0.0),
                )
            # It was renewed since, or its process runs: that one is alive.
            if tag != waits:
                raise RemoteConflict(
                    f"Expected to be the one process that writes {self._run}. Received: another one, process {holder.pid} on "
                    f"{holder.host}. End it, or give this run another lineage."
                )
            time.sleep(min(_LOOK_SECONDS, self.seconds / _RENEWALS))
        self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="danling-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._end.wait(self.seconds / _RENEWALS):
            try:
                begun = time.monotonic()
                # The store may have taken the last one before it fell silent: then it is found there, and is no other writer's.
                for content in filter(None, (self._unanswered, Writer.me(self.seconds).text())):
                    self._unanswered = content
                    assert self._tag is not None
                    self._tag = self.store.put_if_match(self.key, content, self._tag)
                    self._unanswered = None
                self._renewed = begun
            except RemoteConflict as error:
                self._error = RemoteConflict(
                    f"Expected to be the one process that writes {self._run}. Received: another one, which has taken over while this "
                    f"one was silent ({error}). End one of them."
                )
                logger.error("%s", self._error)
                return
            except RemoteError:
                # Such as a store that cannot be reached: the uploads say so. If another process takes over, the next renewal finds it.
                continue

    @property
    def lost(self) -> RemoteError | None:
        """Why nothing may be written now, or any more; `None` while this process is the writer."""
        if (
            self._error is None
            and self._thread is not None
            and time.monotonic() - self._renewed > self.seconds
        ):
            return RemoteUnavailable(
                f"Expected the right to write {self._run} to be renewed in {self.seconds:.0f} s. Received: no answer of the store. Look "
                "whether it can be reached."
            )
        return self._error

    def release(self) -> None:
        """Give the right back. A second call does nothing."""
        thread, self._thread = self._thread, None
        self._end.set()
        if thread is None:
            return
        # A store that does not answer is not waited for: the lease ends by itself.
        answers = time.monotonic() - self._renewed < 2 * self.seconds / _RENEWALS
        # The thread may be in a renewal, after which the tag is another one.
        thread.join(_PATIENCE_SECONDS if answers else 0.0)
        if self._error is None and answers and not thread.is_alive():
            with suppress(RemoteError):
                # Only what this process has put: another one may have taken over since.
                if self.store.get_tagged(self.key)[1] == self._tag:
                    self.store.delete(self.key)


def _probe(key: str) -> str:
    return f"{key}{_PROBE}{uuid.uuid4().hex}"


def _now_there(store: RemoteStore, key: str) -> datetime:
    probe = _probe(key)
    with _removed(store, probe):
        store.put(probe, Writer.me(SECONDS).text())
        return store.head(probe).modified


def remove_probes(store: RemoteStore, key: str) -> None:
    """Remove what killed processes left of their trial of a store's conditions."""
    found = [
        entry
        for entry in store.list(key.rpartition("/")[0], after=key)
        if entry.key.startswith(f"{key}{_PROBE}")
    ]
    if found:
        now = _now_there(store, key)
    for entry in found:
        with suppress(RemoteMissing):
            writer = Writer.parse(store.get(entry.key))
            age = (now - entry.modified).total_seconds()
            if writer is None or writer.runs is False or age > SECONDS:
                store.delete(entry.key)
