"""Reading the files of a DeepSpeed engine through a fixed table of classes.

They are files of `torch.save` that hold tensors, plain values and a handful of DeepSpeed's own records. torch's safe reader reads them
once it knows these; nothing else is looked up, and nothing of DeepSpeed is imported to read them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from . import storage
from .archive import archive_complaints, is_archive
from .errors import CheckpointDamaged, CheckpointError

TRUST = "checkpoint.trust=true (`danling export --trust`)"
"""What a user says to have an engine's files unpickled."""

_RECORDS = (
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
)
_ENUMS = frozenset({"ZeroStageEnum"})


class _Record:
    """What stands for a record of DeepSpeed's in a process that does not use it."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _member(kind: Any, name: object) -> object:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 write one as `getattr` of its class and its name."""
    if getattr(kind, "__name__", None) not in _ENUMS or type(name) is not str:
        raise ValueError(f"getattr of {name!r} is no part of an engine's file")
    if issubclass(kind, _Record):
        return kind(name)
    return kind.__members__[name]


def _table() -> list[Any]:
    """Return what a name in an engine's file becomes, in the form of `torch.serialization.safe_globals`."""
    found: list[Any] = [(_member, "builtins.getattr")]
    for module, name in _RECORDS:
        # The engine has imported what its own files are made of.
        kind = getattr(sys.modules.get(module), name, None)
        found.append((kind or type(name, (_Record,), {}), f"{module}.{name}"))
    return found


def read_engine_file(path: Path, *, map_location: Any = "cpu", trust: bool = False) -> Any:
    """Read a file that an engine wrote."""
    if storage.size_of(path) is None:
        # A named pipe would be waited for.
        raise CheckpointDamaged(f"Expected a file of DeepSpeed's. Received: {path}, which {storage.absence(path)}.")
    problems = archive_complaints(path, tensors=False) if is_archive(path) else []
    if problems:
        raise CheckpointDamaged(f"Expected a file of DeepSpeed's. Received: {path}: {'; '.join(problems)}")
    try:
        with torch.serialization.safe_globals(_table()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        refused = "weights_only" in str(error)
        if not refused:
            raise CheckpointDamaged(f"Expected a file of DeepSpeed's. Received: {path}: {error}") from error
        if not trust:
            raise untrusted(f"{path}, which holds more than tensors, plain values and records of an engine") from error
    return _unpickled(path, map_location)


def _unpickled(path: Path, map_location: Any) -> object:
    try:
        return torch.load(path, map_location=map_location, weights_only=False)
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a file of DeepSpeed's. Received: {path}, on which torch.load fails: {error}"
        ) from error


def untrusted(what: str) -> CheckpointError:
    """Return the error for what takes trust to read."""
    return CheckpointError(
        f"Expected {TRUST} to read {what}. Received: checkpoint.trust=false. Unpickling runs whatever is in a file: set it if you know "
        "who wrote the checkpoint."
    )


def require_trust(trust: bool, path: Path) -> None:
    """Refuse to hand files that nobody trusts to DeepSpeed's own converters, which unpickle them."""
    if not trust:
        raise untrusted(
            f"{path}: its shares are put together by DeepSpeed's own converters, which unpickle them; the same stage on the same number "
            "of ranks needs none of that"
        )
