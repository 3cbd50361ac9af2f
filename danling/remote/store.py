"""A client of an object store: the few operations that runs need, with errors of this library.

    store = open_store("s3://bucket/prefix")
    store.put("lineage/id/files/metrics.jsonl", Path("metrics.jsonl"))

S3 and what speaks its protocol, Google Cloud Storage, Azure and local directories, through obstore, which is imported when a store is first
used. No reader ever sees a part of an object: a `put` of any size is atomic.

The client must not be used in a process that was forked from one that has used it: its threads do not exist there, and every request
would hang. It says so instead."""

from __future__ import annotations

import importlib
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from danling.checkpoints.errors import CheckpointError
from danling.utils.files import TEXT_LIMIT

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("danling")


class RemoteError(CheckpointError):
    """An object store did not do what it was asked for."""


class RemoteMissing(RemoteError):
    """There is no such object, or no such bucket."""


class RemoteExists(RemoteError):
    """An object that was to be created is there already."""


class RemoteConflict(RemoteError):
    """An object that was to be replaced is another one by now, or gone."""


class RemoteDenied(RemoteError):
    """The credentials are missing, have expired, or do not allow the request. To try again without others is no use."""


class RemoteUnavailable(RemoteError):
    """The store could not be reached, did not answer in time, or could not store the data. A later attempt may succeed."""


class RemoteBadKey(RemoteError):
    """A listing has an object whose key has a part `.` or `..`."""


SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "https", "http", "file", "memory")
"""Schemes of the URLs that name a store."""

Credentials = Callable[[], Mapping[str, Any] | None]
"""Returns credentials in the form that obstore takes, such as `access_key_id`, `secret_access_key`, `token` and `expires_at` for S3; `None`
leaves them to the environment."""

_MEMORY: dict[str, ObjectStore] = {}
"""Stores in memory by URL: two clients of this process with one URL see the same objects."""
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_DENIED_CODES = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "AccessDenied",
    "TokenRefreshRequired",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_SKEWED = ("RequestTimeTooSkewed", "Request date header too old")
"""Of S3 and Google Cloud, and of Azure."""
# Beyond the time of one request: so long the client repeats one that fails at once.
_RETRY_SECONDS = 20
STARTING_SECONDS = 30.0
"""How long a run that starts repeats a request, beyond the retries of the client."""
_PAUSE_SECONDS = 0.5
_user: int | None = None
"""The process that has used the client; the threads of obstore do not survive a fork."""


@dataclass(frozen=True)
class RemoteSettings:
    """How a store is asked.

    Attributes:
        part_size: Bytes of a part of an upload; larger files go up in several parts at once.
        timeout_seconds: Longest time of one request, a part of an upload included.
        retries: How often a request is tried again that failed for a reason that may pass.
    """

    part_size: int = 16 << 20
    timeout_seconds: float = 120.0
    retries: int = 5


class Tag(NamedTuple):
    """What tells one put of an object from another: stores compare one of the two, S3 and Azure the first, Google Cloud the second."""

    entity: str | None
    version: str | None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Tag:
        """Read what the client returns."""
        return cls(found.get("e_tag"), found.get("version"))

    @property
    def bare(self) -> Tag:
        """The same without the quotes of the entity tag."""
        return self if self.entity is None else self._replace(entity=self.entity.strip('"'))

    @property
    def condition(self) -> dict[str, str]:
        """What the client takes for it."""
        return {
            name: value
            for name, value in (("e_tag", self.entity), ("version", self.version))
            if value is not None
        }


@dataclass(frozen=True)
class RemoteObject:
    """An object of a listing.

    Attributes:
        key: Its key, relative to the URL of the store.
        size: Its size in bytes.
        modified: When the store received it, by the clock of the store.
    """

    key: str
    size: int
    modified: datetime


def open_store(
    url: str, *, settings: RemoteSettings | None = None, credentials: Credentials | None = None
) -> RemoteStore:
    """Return a client of the store at a URL. Nothing is asked of the store yet."""
    return RemoteStore(url, settings=settings or RemoteSettings(), credentials=credentials)


class RemoteStore:
    """A client of the store at a URL. See `open_store`. Every method raises `RemoteError` or one of its subclasses."""

    def __init__(
        self, url: str, *, settings: RemoteSettings, credentials: Credentials | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.settings = settings
        self.bare_tags = False
        self.starting = self._has_bad_key = False
        check_url(url)
        _obstore()
        self._credentials = credentials
        try:
            self._client = _open(self.url, settings, credentials)
        except Exception as error:
            raise RemoteError(
                f"Expected a URL of an object store, such as s3://bucket/prefix. Received: {url}: {_first_line(error)}. Fix it."
            ) from error

    def put(self, key: str, content: bytes | Path) -> None:
        """Store an object, in place of what was there. It is seen whole or not at all."""
        size = self.settings.part_size
        self._ask(
            "put",
            key,
            lambda store: _obstore().put(
                store, key, content, chunk_size=size, max_concurrency=_PARTS_AT_ONCE
            ),
        )

    def put_if_absent(self, key: str, content: bytes) -> Tag:
        """Store a small object where there is none. No other writer may store the same contents: see below.

        Where the answer of the store was lost, the object is read back, and if it has these contents it counts as stored.
        """
        return self._put_on_condition(key, content, "create", RemoteExists)

    def put_if_match(self, key: str, content: bytes, tag: Tag) -> Tag:
        """Replace a small object, if it is the one with this tag. No other writer may store the same contents, as in `put_if_absent`."""
        return self._put_on_condition(
            key, content, (tag.bare if self.bare_tags else tag).condition, RemoteConflict
        )

    def _put_on_condition(
        self, key: str, content: bytes, mode: object, refused: type[RemoteError]
    ) -> Tag:
        try:
            found = self._ask(
                "put",
                key,
                lambda store: _obstore().put(store, key, content, mode=mode, use_multipart=False),
                refused=refused,
            )
            return Tag.of(found)
        # A store that refuses the request has not done it.
        except RemoteDenied:
            raise
        except RemoteError:
            # A request whose answer was lost may have done its work, and then the next attempt finds its own object in its way.
            with suppress(RemoteError):
                found, tag = self.get_tagged(key)
                if found == content:
                    return tag
            raise

    def get(self, key: str, *, limit: int = TEXT_LIMIT) -> bytes:
        """Return the contents of an object of at most so many bytes."""
        return self.get_tagged(key, limit=limit)[0]

    def get_tagged(self, key: str, *, limit: int = TEXT_LIMIT) -> tuple[bytes, Tag]:
        """Return the contents and the tag of an object of at most so many bytes."""

        def read(store: ObjectStore) -> tuple[bytes, Tag]:
            found = _obstore().get(store, key)
            # Before the contents are read: an object of another program may have any size.
            size = int(found.meta["size"])
            if size > limit:
                raise RemoteError(
                    f"Expected an object of at most {limit:,} bytes at {key}. Received: {size:,} bytes."
                )
            return bytes(found.bytes()), Tag.of(found.meta)

        found: tuple[bytes, Tag] = self._ask("get", key, read)
        return found

    def chunks(self, key: str, size: int = 8 << 20) -> Iterator[memoryview]:
        """Yield the contents of an object piece by piece; a large one need not fit into memory."""
        stream = self._ask(
            "get", key, lambda store: _obstore().get(store, key).stream(min_chunk_size=size)
        )
        while (
            piece := self._ask("get", key, lambda _: next(stream, None), patient=False)
        ) is not None:
            yield memoryview(piece)

    def head(self, key: str) -> RemoteObject:
        """Return what a listing would say of an object."""
        return _object(self._ask("look at", key, lambda store: _obstore().head(store, key)))

    def directories(self, prefix: str = "") -> list[str]:
        """Return the names directly below a prefix that have further keys below them, sorted."""
        try:
            names, _ = self._level(prefix)
            return [*names]
        except RemoteBadKey as error:
            self._name_bad_key(error)
            below = posixpath.join(prefix, "")
            keys = [entry.key.removeprefix(below) for entry in self._list_behind_dots(prefix)]
            return sorted({key.partition("/")[0] for key in keys if "/" in key})

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[RemoteObject]:
        """Yield the objects below a prefix, as directories do: `a/b` does not list `a/bc`. In order of keys on most stores.

        An object whose key has a part `.` or `..`, which another program has made, is named in the log once and left out.
        """
        # `after` moves on, so that what was listed before a key that cannot be read comes once.
        try:
            for entry in self._list(prefix, after):
                yield entry
                after = entry.key
        except RemoteBadKey as error:
            self._name_bad_key(error)
            # No page that has such a key can be read, so the directories are listed one by one.
            yield from (entry for entry in self._walk(prefix) if after is None or entry.key > after)

    def _list(self, prefix: str, after: str | None = None) -> Iterator[RemoteObject]:
        def begin(store: ObjectStore) -> tuple[Any, Any]:
            pages = iter(_obstore().list(store, prefix or None, offset=after, chunk_size=_PAGE))
            return pages, next(pages, None)

        pages, page = self._ask("list", prefix, begin)
        while page:
            yield from (_object(entry) for entry in page)
            page = self._ask("list", prefix, lambda _: next(pages, None), patient=False)

    def _level(self, prefix: str) -> tuple[Sequence[str], Sequence[RemoteObject]]:
        """Return the names of directories directly below a prefix, sorted, and the objects there."""
        found = self._ask(
            "list", prefix, lambda store: _obstore().list_with_delimiter(store, prefix or None)
        )
        names = sorted(
            str(name).rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]
        )
        return names, [_object(entry) for entry in found["objects"]]

    def _walk(self, prefix: str) -> Iterator[RemoteObject]:
        """Yield the objects below a prefix, directory by directory."""
        try:
            names, objects = self._level(prefix)
        except RemoteBadKey as error:
            self._name_bad_key(error)
            yield from self._list_behind_dots(prefix)
            return
        yield from objects
        for name in names:
            yield from self._walk(posixpath.join(prefix, name))

    def _list_behind_dots(self, prefix: str) -> Sequence[RemoteObject]:
        """Return the objects below a prefix that come after its parts `.` and `..`; none if there are others further below."""
        try:
            # As keys are ordered, `..` is before `./`, and that before `.0`; names of a run come later.
            return [*self._list(prefix, posixpath.join(prefix, ".0"))]
        except RemoteBadKey as error:
            self._name_bad_key(error)
            return []

    def _name_bad_key(self, error: RemoteBadKey) -> None:
        if not self._has_bad_key:
            self._has_bad_key = True
            logger.warning(
                "%s has an object that no run has made, and whose key cannot be read: %s",
                self.url,
                error,
            )

    def delete(self, key: str) -> None:
        """Remove an object; one that is gone already is no error."""
        with suppress(RemoteMissing):
            self._ask("delete", key, lambda store: _obstore().delete(store, key))

    def _ask(
        self,
        operation: str,
        key: str,
        call: Callable[[ObjectStore], object],
        *,
        refused: type[RemoteError] = RemoteUnavailable,
        patient: bool = True,
    ) -> Any:
        """Return what a call of the client returns; its errors become those of this library."""
        global _user
        if _user not in (None, os.getpid()):
            raise RemoteError(
                f"Expected {self.url} to be used by the process that opened it. Received: a process that was forked from it, in which the "
                "client hangs. Start processes that use an object store by 'spawn' or 'forkserver'."
            )
        _user = os.getpid()
        end = math.inf
        # A stream that has begun cannot be asked again from its beginning.
        may_renew = patient and self._credentials is not None
        while True:
            try:
                return call(self._client)
            except RemoteError:
                raise
            except Exception as error:
                failure = _error_of(error, operation, f"{self.url}/{key}".rstrip("/"), refused)
                if may_renew and isinstance(failure, RemoteDenied):
                    # The client keeps credentials until they expire, and does not notice that they were revoked.
                    may_renew = False
                    self._client = _open(self.url, self.settings, self._credentials)
                    continue
                if (
                    not (patient and self.starting and isinstance(failure, RemoteUnavailable))
                    or time.monotonic() > end
                ):
                    raise failure from error
                if end == math.inf:
                    end = time.monotonic() + STARTING_SECONDS
                    logger.warning(
                        "%s does not answer as it should, and is asked again for up to %.0f s: %s",
                        self.url,
                        STARTING_SECONDS,
                        _first_line(error),
                    )
                time.sleep(_PAUSE_SECONDS)


# Parts of an upload are in memory: four of 16 MiB.
_PARTS_AT_ONCE = 4
# As many as S3 returns in one answer.
_PAGE = 1000


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ImportError(
            "Expected obstore, which reads and writes object stores. Received: it is not installed. Run `pip install obstore`, or `pip "
            "install -e '.[remote]'` in a clone of this library."
        ) from error


def check_url(url: str) -> None:
    """Refuse a URL that names no store."""
    parts = urlsplit(url)
    scheme = parts.scheme if "://" in url else ""
    place = parts.path.strip("/") if scheme in ("file", "memory") else parts.netloc
    if scheme not in SCHEMES or (not place and scheme != "memory"):
        raise RemoteError(
            "Expected the URL of an object store: s3://bucket/prefix, gs://bucket/prefix, abfss://container@account.dfs.core.windows.net/"
            f"prefix, file:///directory. Received: {url!r}. Give one of these."
        )
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        raise RemoteError(
            f"Expected the absolute path of a directory, as in file:///abs/path. Received: {url!r}, in which {parts.netloc!r} takes "
            f"the place of a host. Give file://{Path.cwd() / parts.netloc}{parts.path}, or its place."
        )


def _open(url: str, settings: RemoteSettings, credentials: Credentials | None) -> ObjectStore:
    from obstore.store import LocalStore, MemoryStore, from_url

    parts = urlsplit(url)
    if parts.fragment or parts.query:
        # Else what comes after it would be left out, and the objects would be at another place.
        raise ValueError("a '#' is written as %23 in a URL, and a '?' as %3F")
    scheme, path = parts.scheme, unquote(parts.path)
    if scheme == "file":
        return LocalStore(path, mkdir=True)
    if scheme == "memory":
        return _MEMORY.setdefault(url, MemoryStore())
    seconds = timedelta(seconds=settings.timeout_seconds)
    options: Any = {
        # A server on this machine or in a private network is spoken to without TLS where its address says so; those of the clouds do not.
        "client_options": {
            "timeout": seconds,
            "connect_timeout": min(seconds, timedelta(seconds=10)),
            "allow_http": True,
        },
        "retry_config": {
            "max_retries": settings.retries,
            "retry_timeout": seconds + timedelta(seconds=_RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(seconds=0.2),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        },
    }
    if scheme in ("s3", "s3a"):
        # The request that deletes several objects is one that some servers do not know.
        options["config"] = {"disable_bulk_delete": True}
    if credentials is not None and credentials() is not None:
        # The client asks again when they have expired; without a time it would never ask again.
        options["credential_provider"] = lambda: {"expires_at": None, **(credentials() or {})}
    return from_url(url, **options)


def _object(entry: Mapping[str, Any]) -> RemoteObject:
    return RemoteObject(entry["path"], entry["size"], entry["last_modified"])


def _error_of(
    error: Exception, operation: str, place: str, refused: type[RemoteError]
) -> RemoteError:
    """Return the error of this library for one of the client."""
    from obstore import exceptions

    text, received = str(error), _first_line(error)
    # The code of the store says more than the status: obstore puts the store's answer into the text.
    code = _CODE.search(text)
    named = code.group(1) if code else ""
    if named and named not in received:
        received = f"{named}: {received}"
    status = _STATUS.search(text)
    expected = f"Expected to {operation} {place}. Received: {received}."
    if any(sign in text for sign in _SKEWED):
        return RemoteDenied(f"{expected} The clock of this machine is off: set it.")
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if (
        isinstance(error, denied)
        or named in _DENIED_CODES
        or (status and status.group(1) in ("401", "403"))
    ):
        return RemoteDenied(
            f"{expected} Give credentials that are valid and allow it: in the environment, or by the hook remote_credentials()."
        )
    no_bucket = any(name in text for name in _NO_BUCKET)
    if isinstance(error, FileNotFoundError) or no_bucket:
        fix = (
            "Make the bucket, or name another one" if no_bucket else "Name an object that is there"
        )
        return RemoteMissing(f"{expected} {fix}.")
    # Some stores answer a refused creation as a condition that does not hold.
    changed = RemoteExists if refused is RemoteExists else RemoteConflict
    others: list[tuple[type[Exception], type[RemoteError], str]] = [
        (exceptions.InvalidPathError, RemoteBadKey, "Remove that object."),
        (exceptions.AlreadyExistsError, RemoteExists, "Another process has made it."),
        (exceptions.PreconditionError, changed, "Another process has changed it."),
        (exceptions.NotSupportedError, RemoteError, "This kind of store cannot do that."),
        (NotImplementedError, RemoteError, "This kind of store cannot do that."),
        (Exception, RemoteUnavailable, "Look whether the store can be reached and has room."),
    ]
    kind, fix = next((kind, fix) for raised, kind, fix in others if isinstance(error, raised))
    return kind(f"{expected} {fix}")


def _first_line(error: Exception) -> str:
    """Return what an error says, on one line and without the client's own dump of it."""
    text = str(error).partition("Debug source:")[0]
    return (
        " ".join(re.sub(r"<\?xml.*", "", text, flags=re.DOTALL).split()).rstrip(" .:")
        or type(error).__name__
    )
