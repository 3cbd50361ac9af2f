"""The files of a DeepSpeed checkpoint: an engine's tag, and beside its files what the runner saves.

Reading the runner's part needs nothing of DeepSpeed and runs nothing that is in the file. The engine's own files are pickles of
DeepSpeed's: reading weights or optimizer out of them runs what is in them, as DeepSpeed itself does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.utils.names import canonical_name

from . import storage
from .errors import CheckpointDamaged, CheckpointError
from .reading import check_format, read_file

RUNNER_FILE = "runner.pth"
"""Everything but model and optimizer, for `torch.load(weights_only=True)`."""


@dataclass(frozen=True)
class EngineTag:
    """Model and optimizer of a checkpoint that an engine reads itself.

    Attributes:
        path: The target: a tag of DeepSpeed's.
        stage: ZeRO stage it was saved at.
        world_size: Number of ranks that saved it.
    """

    path: Path
    stage: int
    world_size: int


class HashingFiles:
    """Writes and reads the files of an engine: durable and hashed when written, and no error hides on one rank.

    What a DeepSpeed engine asks of its checkpoint engine. A rank whose write fails goes on to the engine's barriers, and the error is
    raised when all ranks have come through.

    Attributes:
        written: `(size in bytes, SHA-256)` by file name.
        error: The first error of a write.
    """

    def __init__(self) -> None:
        self.name = "danling"
        self.written: dict[str, tuple[int, str]] = {}
        self.error: Exception | None = None

    def create(self, info: Any) -> None:
        """Nothing is to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory that may be there already: every rank does."""
        self._try(lambda: storage.make_directory(Path(path)))

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""
        self._try(lambda: self._write(state_dict, Path(path)))

    def _write(self, state: Any, path: Path) -> None:
        self.written[path.name] = storage.write_file(path, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self.error = self.error or error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file of DeepSpeed's."""
        return read_engine_file(Path(path), map_location=map_location)

    def commit(self, info: Any) -> bool:
        """Nothing is left to do."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a rank writes what is equal on all."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written in the background."""
        return False

    def set_commit_info(self, info: Any) -> None:
        """Nothing is committed later."""

    def get_commit_info(self) -> None:
        """Nothing is committed later."""

    def cleanup(self) -> None:
        """Nothing is held."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so when they are read."""
        return True


def read_engine_file(path: Path, *, map_location: Any = "cpu") -> Any:
    """Read a file that an engine wrote. It is a pickle: whatever is in it runs.

    Raises:
        CheckpointDamaged: If torch cannot read it.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=False)
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a file of DeepSpeed's. Received: {path}, on which torch.load fails: {error}"
        ) from error


def is_engine_target(path: Path) -> bool:
    """Whether a target was written by the DeepSpeed manager."""
    return storage.size_of(path / RUNNER_FILE) is not None


def read_runner_file(path: Path) -> dict[str, Any]:
    """Return what the runner saved in a target, without model and optimizer unless it is an export."""
    return check_format(read_file(path / RUNNER_FILE), path)


def read_engine_target(path: Path, *, sections: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the payload of a target with whole float32 weights; the optimizer stays with the engine.

    Args:
        path: The target.
        sections: Components to return; `None` returns all.
    """
    payload = read_runner_file(path)
    if "model" not in payload and (sections is None or "model" in sections):
        payload["model"] = consolidated_weights(path)
    return {name: value for name, value in payload.items() if sections is None or name in sections}


def consolidated_weights(path: Path) -> dict[str, Tensor]:
    """Return the whole float32 weights of a target by canonical name, put together from the shares of all ranks.

    Raises:
        CheckpointError: If DeepSpeed, which does it, is not installed.
        CheckpointDamaged: If a file cannot be read.
    """
    if not any(path.glob("*_optim_states.pt")):
        module = read_engine_file(path / "mp_rank_00_model_states.pt")["module"]
        return {canonical_name(name): tensor for name, tensor in module.items()}
    if find_spec("deepspeed") is None:
        raise CheckpointError(
            f"Expected deepspeed, which puts the weights of {path} together. Received: it is not installed. Install it: "
            "pip install 'danling[deepspeed]'; or export the checkpoint where it is."
        )
    convert = import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
    weights: Mapping[str, Tensor] = convert(str(path.parent), tag=path.name)
    return {canonical_name(name): tensor.detach().clone() for name, tensor in weights.items()}
