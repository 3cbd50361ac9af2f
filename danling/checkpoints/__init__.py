"""Checkpoints: which are kept (policy), how they lie on disk (stores), who writes them (managers, executor), and readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .base import CheckpointManager
    from .deepspeed import DeepSpeedCheckpointManager, export_deepspeed_checkpoint
    from .errors import CheckpointDamaged, CheckpointDiskError, CheckpointError, CheckpointMismatch, CheckpointNotFound
    from .exchange import export_weights, import_weights
    from .exclusion import exclude
    from .file import FileCheckpointManager
    from .reading import read_config, read_model
    from .settings import CheckpointSettings
    from .torch_distributed import TorchDistributedCheckpointManager
else:
    # torch.distributed.checkpoint takes its time to import, and most runs write files; to verify them needs no torch at all.
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "base": ("CheckpointManager",),
            "deepspeed": ("DeepSpeedCheckpointManager", "export_deepspeed_checkpoint"),
            "errors": (
                "CheckpointDamaged",
                "CheckpointDiskError",
                "CheckpointError",
                "CheckpointMismatch",
                "CheckpointNotFound",
            ),
            "exchange": ("export_weights", "import_weights"),
            "exclusion": ("exclude",),
            "file": ("FileCheckpointManager",),
            "reading": ("read_config", "read_model"),
            "settings": ("CheckpointSettings",),
            "torch_distributed": ("TorchDistributedCheckpointManager",),
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
    "DeepSpeedCheckpointManager",
    "FileCheckpointManager",
    "TorchDistributedCheckpointManager",
    "exclude",
    "export_deepspeed_checkpoint",
    "export_weights",
    "import_weights",
    "read_config",
    "read_model",
]
