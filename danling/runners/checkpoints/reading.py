"""Reading parts of a checkpoint without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound
from .file_store import SUFFIX, read_manifest

if TYPE_CHECKING:
    from .base import CheckpointManager

FORMAT_VERSION = 1
"""The newest `format_version` that can be read."""


def load_payload(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU, with torch's safe reader.

    Args:
        path: The file.
        mmap: Leave the tensors on disk until they are used.

    Raises:
        CheckpointDamaged: If torch cannot read it.
        CheckpointMismatch: If it is no checkpoint of this library, or of a format that this version does not know.
    """
    return check_format(read_file(path, mmap=mmap), path)


def read_file(path: Path, *, mmap: bool = False) -> Any:
    """Read any file of `torch.save`, with torch's safe reader.

    Raises:
        CheckpointDamaged: If torch cannot read it.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a readable file. Received: {path}, on which torch.load fails: {error}"
        ) from error


def check_format(payload: Any, path: Path) -> dict[str, Any]:
    """Return a payload that this version understands.

    Raises:
        CheckpointMismatch: If it is none.
    """
    version = payload.get("format_version") if isinstance(payload, Mapping) else None
    if not isinstance(version, int):
        raise CheckpointMismatch(
            f"Expected a checkpoint of this library. Received: {path}, which has no format_version. Load bare weights with `pretrained`."
        )
    if version > FORMAT_VERSION:
        raise CheckpointMismatch(
            f"Expected a checkpoint of format_version {FORMAT_VERSION} or older. Received: {path} of format_version {version}. Update "
            "danling to read it."
        )
    return dict(payload)


def checkpoint_file(source: str | Path) -> Path:
    """Return the file that a path means: itself, or `latest.pth` in a checkpoint or run directory.

    Raises:
        CheckpointNotFound: If there is none.
    """
    path = Path(source)
    for candidate in (path, path / f"latest{SUFFIX}", path / "checkpoints" / f"latest{SUFFIX}"):
        if candidate.is_file():
            return candidate
    raise CheckpointNotFound(f"Expected a checkpoint file or directory. Received: {str(path)!r}, where there is none.")


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read.

    Args:
        source: A checkpoint file, or a directory with one.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If it cannot be read, or has another size than was written.
    """
    path = checkpoint_file(source)
    read_manifest(path, "size")
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
            raise ImportError(
                "Expected safetensors to read a .safetensors file. Install it: pip install safetensors."
            ) from error
        return dict(load_file(path))
    loaded = read_file(path)
    weights = loaded.get("model", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointMismatch(
            f"Expected a state_dict of tensors. Received: {path}, which holds {type(loaded).__name__}."
        )
    return dict(weights)
