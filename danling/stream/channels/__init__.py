"""The log of a stream: which samples there are, in which order, and which are no longer needed."""

from __future__ import annotations

from .memory import MemoryChannel

__all__ = ["MemoryChannel"]
