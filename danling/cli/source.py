"""From what a user types to a checkpoint on disk."""

from __future__ import annotations

from danling.checkpoints.backends import locate

__all__ = ["locate"]
