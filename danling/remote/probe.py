"""Tries what a run asks of an object store, with objects of a name that nobody else has, which are removed again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from .errors import RemoteError, RemoteMissing
from .lease import CREATE, REPLACE, creates_once, replaces_once
from .store import RemoteStore

_PARTS = 3
_LARGEST_SKEW_SECONDS = 300.0


def _contents() -> bytes:
    return uuid.uuid4().bytes


class Trial(NamedTuple):
    """What came of one request.

    Attributes:
        name: What was tried.
        state: `ok`, `failed`, or `absent` for what a run can do without.
        detail: A figure, or why it failed.
        seconds: How long it took.
    """

    name: str
    state: str
    detail: str
    seconds: float


class Probe:
    """Tries a store."""

    def __init__(self, store: RemoteStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._prefix = f".danling-probe-{uuid.uuid4().hex}"
        self._key = f"{self._prefix}/small"
        self._large = f"{self._prefix}/large"
        self._content = uuid.uuid4().bytes * 4

    def run(self) -> Iterator[Trial]:
        """Yield a trial after the other; what was put is removed at the end, whatever fails."""
        trials: dict[str, Callable[[], tuple[str, str]]] = {
            "put": self._put,
            "get": self._get,
            "list": self._list,
            "parts": self._parts,
            "create": self._create,
            "match": self._match,
            "clock": self._clock,
            "delete": self._delete,
        }
        try:
            for name, trial in trials.items():
                yield _timed(name, trial)
                # Nothing can be said of what is not there.
                if name == "put" and not self._is_there():
                    return
        finally:
            with suppress(RemoteError):
                self._store.delete([self._key, self._large])

    def _is_there(self) -> bool:
        try:
            self._store.head(self._key)
        except RemoteError:
            return False
        return True

    def _put(self) -> tuple[str, str]:
        self._store.put(self._key, self._content)
        return "ok", f"{len(self._content)} bytes"

    def _get(self) -> tuple[str, str]:
        return _same(self._store.get(self._key), self._content)

    def _list(self) -> tuple[str, str]:
        found = [entry.key for entry in self._store.list(self._prefix)]
        return ("ok", "1 object") if found == [self._key] else ("failed", f"a listing of one object has {found}")

    def _parts(self) -> tuple[str, str]:
        size = self._store.settings.part_size * (_PARTS - 1) + 1
        file = self._folder / "large"
        with file.open("wb") as content:
            content.truncate(size)
        start = time.monotonic()
        self._store.put(self._large, file)
        seconds = time.monotonic() - start
        found = self._store.head(self._large).size
        if found != size:
            return "failed", f"{size} bytes were put in {_PARTS} parts, and {found} are there"
        return "ok", f"{size / 1e6:.0f} MB in {_PARTS} parts, {size / 1e6 / max(seconds, 1e-9):.0f} MB/s"

    def _create(self) -> tuple[str, str]:
        if creates_once(self._store, self._key, _contents):
            return "ok", f"{CREATE}: an object that is there is not replaced"
        return "absent", f"it does not keep to {CREATE}: two writers of a run are not kept apart"

    def _match(self) -> tuple[str, str]:
        tag = self._store.get_tagged(self._key)[1]
        if replaces_once(self._store, self._key, tag, _contents):
            return "ok", f"{REPLACE}: an object is replaced by who has read it last, and by nobody else"
        return "absent", f"it does not keep to {REPLACE}: two writers of a run are not kept apart"

    def _clock(self) -> tuple[str, str]:
        self._store.put(self._key, self._content)
        there = self._store.head(self._key).modified
        skew = (datetime.now(timezone.utc) - there).total_seconds()
        detail = f"this machine is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store"
        if abs(skew) > _LARGEST_SKEW_SECONDS:
            return "failed", f"{detail}, which refuses requests from about 15 minutes on: set the clock"
        return "ok", detail

    def _delete(self) -> tuple[str, str]:
        self._store.delete([self._key, self._large])
        try:
            self._store.head(self._key)
        except RemoteMissing:
            return "ok", "gone"
        return "failed", "what was deleted is still there"


def _same(found: bytes, expected: bytes) -> tuple[str, str]:
    return ("ok", f"{len(found)} bytes") if found == expected else ("failed", "other bytes came back than were put")


def _timed(name: str, trial: Callable[[], tuple[str, str]]) -> Trial:
    start = time.monotonic()
    try:
        state, detail = trial()
    except RemoteError as error:
        state, detail = "failed", str(error)
    return Trial(name, state, detail, round(time.monotonic() - start, 2))


def lifecycle_rule(url: str) -> str:
    """Return how the store at a URL is told to remove the parts of uploads that a killed process has left: they are listed nowhere, and
    are paid for.
    """
    parts = urlsplit(url)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if parts.scheme in ("s3", "s3a"):
        filtered = f'"Filter":{{"Prefix":"{prefix}"}}' if prefix else '"Filter":{}'
        rule = (
            '{"Rules":[{"ID":"danling-orphaned-parts","Status":"Enabled",' + filtered + ","
            '"AbortIncompleteMultipartUpload":{"DaysAfterInitiation":2}}]}'
        )
        return f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration '{rule}'"
    if parts.scheme == "gs":
        rule = '{"rule":[{"action":{"type":"AbortIncompleteMultipartUpload"},"condition":{"age":2}}]}'
        return f"echo '{rule}' > rule.json && gcloud storage buckets update gs://{bucket} --lifecycle-file=rule.json"
    if parts.scheme in ("az", "azure", "abfs", "abfss"):
        return "none is needed: Azure removes blocks that were not committed after a week"
    return "none is needed: an upload that was cut leaves nothing in this kind of store"
