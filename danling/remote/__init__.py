"""Runs in object stores: where their objects are (layout), a typed client (store), and what copies a run there."""

from __future__ import annotations

from .store import (
    RemoteConflict,
    RemoteDenied,
    RemoteError,
    RemoteExists,
    RemoteMissing,
    RemoteObject,
    RemoteSettings,
    RemoteStore,
    RemoteUnavailable,
    is_url,
    open_store,
)
from .stored_run import RunLayout

__all__ = [
    "RemoteConflict",
    "RemoteDenied",
    "RemoteError",
    "RemoteExists",
    "RemoteMissing",
    "RemoteObject",
    "RemoteSettings",
    "RemoteStore",
    "RemoteUnavailable",
    "RunLayout",
    "is_url",
    "open_store",
]
