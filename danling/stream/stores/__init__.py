"""Where the features of a stream are until a durable checkpoint no longer needs them."""

from __future__ import annotations

from .directory import DirectoryStore
from .memory import MemoryStore
from .mooncake import MooncakeStore

__all__ = ["DirectoryStore", "MemoryStore", "MooncakeStore"]
