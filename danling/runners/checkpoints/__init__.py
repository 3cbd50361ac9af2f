"""Checkpoints: policy, store and executor, and what reads them."""

from __future__ import annotations

from .base import CheckpointManager
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .exclusion import exclude
from .file import FileCheckpointManager
from .reading import read_config, read_model
from .settings import CheckpointSettings

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointSettings",
    "FileCheckpointManager",
    "exclude",
    "read_config",
    "read_model",
]
