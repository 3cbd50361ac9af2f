"""Runs in object stores: where their objects lie (layout), a typed client (store), and what copies a run there."""

from __future__ import annotations

from .errors import RemoteConflict, RemoteDenied, RemoteError, RemoteExists, RemoteMissing, RemoteUnavailable
from .layout import RunLayout
from .store import RemoteObject, RemoteSettings, RemoteStore, is_url, open_store

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
