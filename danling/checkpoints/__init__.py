"""Checkpoints: how they are arranged (`file_store`, `target_store`), found (`directory`), written (`manager`, `dcp`), read (`reading`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .dcp import TorchDistributedCheckpointManager
    from .errors import (
        CheckpointDamaged,
        CheckpointDiskError,
        CheckpointError,
        CheckpointMismatch,
        CheckpointNotFound,
    )
    from .exchange import export_weights, import_weights, read_model
    from .manager import CheckpointManager, CheckpointSettings, FileCheckpointManager
    from .reading import exclude, read_config
else:
    # torch.distributed.checkpoint takes its time to import, and most runs write files; to verify them needs no torch at all.
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "dcp": ("TorchDistributedCheckpointManager",),
            "errors": (
                "CheckpointDamaged",
                "CheckpointDiskError",
                "CheckpointError",
                "CheckpointMismatch",
                "CheckpointNotFound",
            ),
            "exchange": ("export_weights", "import_weights", "read_model"),
            "manager": ("CheckpointManager", "CheckpointSettings", "FileCheckpointManager"),
            "reading": ("exclude", "read_config"),
        },
    )

__all__ = [
    "CheckpointDamaged",
    "CheckpointDiskError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointSettings",
    "FileCheckpointManager",
    "TorchDistributedCheckpointManager",
    "exclude",
    "export_weights",
    "import_weights",
    "read_config",
    "read_model",
]
