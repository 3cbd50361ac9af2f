"""The log of a stream: which samples there are, in which order, and which are no longer needed."""

from __future__ import annotations

from .file import FileChannel
from .memory import MemoryChannel
from .sqlite import SQLiteChannel

__all__ = ["FileChannel", "MemoryChannel", "SQLiteChannel"]
