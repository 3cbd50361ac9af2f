"""Reading parts of a checkpoint without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import CheckpointManager
from .errors import CheckpointMismatch, CheckpointNotFound
from .file import guarded, load_payload, verify_file


def checkpoint_file(source: str | Path) -> Path:
    """Return the file that a path means: itself, or `latest.pth` in a checkpoint or run directory.

    Raises:
        CheckpointNotFound: If there is none.
    """
    path = Path(source)
    for candidate in (path, path / "latest.pth", path / "checkpoints" / "latest.pth"):
        if candidate.is_file():
            return candidate
    raise CheckpointNotFound(f"Expected a checkpoint file or directory. Received: {str(path)!r}, where there is none.")


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read."""
    path = checkpoint_file(source)
    verify_file(path, "size")
    return dict(load_payload(path, mmap=True)["runner"])


def read_model(manager: CheckpointManager, source: str | Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of this library, or of a file that holds a plain `state_dict`. Call on all ranks.

    Args:
        manager: Finds and verifies checkpoints of this library.
        source: A name or a path; `.safetensors` files are read too.

    Raises:
        CheckpointMismatch: If there are no weights in it.
    """
    path = Path(source)
    if path.is_file() and not (path.parent / f"{path.name}.sha256").is_file():
        return _plain_weights(path)
    payload = manager.load_checkpoint(source)
    weights = payload.get("model")
    if not isinstance(weights, Mapping):
        raise CheckpointMismatch(f"Expected a checkpoint with a model. Received: {source} with {sorted(payload)}.")
    return dict(weights)


def _plain_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("Expected safetensors to read a .safetensors file. Install it: pip install safetensors.") from error
        return dict(load_file(path))
    loaded = guarded(lambda: torch.load(path, map_location="cpu", weights_only=True), path)
    weights = loaded.get("model", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointMismatch(f"Expected a state_dict of tensors. Received: {path}, which holds {type(loaded).__name__}.")
    return dict(weights)
