"""Checkpoints: policy, store and executor, and what reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import CheckpointManager
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .exchange import export_weights, import_weights
from .exclusion import exclude
from .file import FileCheckpointManager
from .reading import read_config, read_model
from .settings import CheckpointSettings

if TYPE_CHECKING:
    from .deepspeed import DeepSpeedCheckpointManager, export_deepspeed_checkpoint
    from .torch_distributed import TorchDistributedCheckpointManager

__all__ = [
    "CheckpointDamaged",
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


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes its time to import, and most runs write files.
    if name == "TorchDistributedCheckpointManager":
        from .torch_distributed import TorchDistributedCheckpointManager

        return TorchDistributedCheckpointManager
    if name in ("DeepSpeedCheckpointManager", "export_deepspeed_checkpoint"):
        from . import deepspeed

        return getattr(deepspeed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
