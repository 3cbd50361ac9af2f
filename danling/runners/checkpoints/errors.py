"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamaged(CheckpointError):
    """A file is not what was written."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but not one of this run, model or configuration."""
