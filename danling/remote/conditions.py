"""Whether a store keeps to conditions: an object that is created once, and replaced by who has read it last, keeps two writers apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from .errors import RemoteDenied, RemoteError, RemoteExists, RemoteUnavailable
from .store import RemoteStore, Tag

CREATE, REPLACE = "If-None-Match", "If-Match"
"""The conditions, as S3 calls them."""


def unkept(store: RemoteStore, key: str, contents: Callable[[], bytes]) -> str | None:
    """Try whether a store creates an object only once, and replaces it only where it is the expected one.

    Args:
        store: The store.
        key: A key that nobody else has; the object is removed again.
        contents: Returns what to put, never the same twice.

    Returns:
        The condition that it does not keep to; `None` where it keeps to both.

    Raises:
        RemoteError: If the store cannot be written at all.
    """
    try:
        first = store.put_if_absent(key, contents())
        if not creates_once(store, key, contents):
            return CREATE
        return None if replaces_once(store, key, first, contents) else REPLACE
    finally:
        with suppress(RemoteError):
            store.delete(key)


def creates_once(store: RemoteStore, key: str, contents: Callable[[], bytes]) -> bool:
    """Whether an object that is there is not created again."""
    try:
        store.put_if_absent(key, contents())
    except RemoteExists:
        return True
    return False


def replaces_once(store: RemoteStore, key: str, tag: Tag, contents: Callable[[], bytes]) -> bool:
    """Whether the object with a tag is replaced, and not a second time by who has that tag.

    Some stores compare the tag without its quotes, such as the gateway of Ceph 16; a store that is found to do so is asked in this way from
    then on.
    """
    for bare in (False, True):
        store.bare_tags = bare
        if _is_replaced(store, key, tag, contents()):
            if not _is_replaced(store, key, tag, contents()):
                return True
            break
    store.bare_tags = False
    return False


def _is_replaced(store: RemoteStore, key: str, tag: Tag, content: bytes) -> bool:
    try:
        store.put_if_match(key, content, tag)
    except (RemoteDenied, RemoteUnavailable):
        raise
    except RemoteError:
        # A conflict, or a store that knows no such request.
        return False
    return True
