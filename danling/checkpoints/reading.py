"""Reads a checkpoint, or parts of it, without a runner."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .backends import backend_of, locate
from .errors import CheckpointError, CheckpointMismatch
from .exchange import import_weights, weights_in
from .file_store import has_sums
from .policy import is_name
from .target_store import TARGETS
from .torch_files import FORMAT_VERSION, holds_format, read_file

__all__ = [
    "FORMAT_VERSION",
    "moment",
    "obeyed",
    "read_config",
    "read_file",
    "read_model",
    "read_payload",
    "read_sections",
    "stored_seed",
]

if TYPE_CHECKING:
    from .base import CheckpointManager

logger = logging.getLogger("danling")


def read_payload(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: Iterable[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, a file or a directory, onto the CPU, without running anything that is in it. Verifies nothing."""
    wanted = None if sections is None else frozenset({*sections, "format_version"})
    return backend_of(path).read_payload(path, template=template, sections=wanted, mmap=mmap, trust=trust)


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read.

    Args:
        source: A checkpoint, or a checkpoint or run directory with a `latest`.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If it cannot be read, or a file has another size than was written.
        CheckpointMismatch: If it holds no configuration.
    """
    config = read_sections(source, ["runner"]).get("runner")
    if not isinstance(config, Mapping):
        raise CheckpointMismatch(
            f"Expected a checkpoint with the configuration of a run. Received: {source}, without one."
        )
    return dict(config)


def stored_seed(directory: Path, asked: str | Path | None) -> int | None:
    """Return the seed of the checkpoint that a run will resume from, so that construction draws the same random numbers again."""
    if asked is None:
        sources = [directory / name for name in ("latest", "latest.pth", "best", "best.pth")]
    else:
        sources = [Path(asked), directory / asked, directory / f"{asked}.pth"]
    for source in sources:
        try:
            seed = read_config(source).get("seed")
        except (CheckpointError, OSError):
            continue
        return int(seed) if seed is not None else None
    return None


def read_sections(source: str | Path, sections: Iterable[str]) -> dict[str, Any]:
    """Return components of a checkpoint, found as `read_config` finds it; the tensors of a file stay on disk until they are used."""
    store, found = locate(source)
    store.verify(found, "size")
    return read_payload(store.target(found), sections=sections, mmap=True)


# A file must not declare itself trusted. Compiled code runs when it is loaded, and options of a compiler can name programs that it runs.
_NEVER_OBEYED = frozenset({"checkpoint.trust", "compile.precompile_artifact_dir"})
_COMPILER = "compile.options."


def obeyed(stored: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the settings of a checkpoint without those by which a file could declare itself trusted or name code to run."""
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"  # a name may be dotted itself
        if isinstance(value, Mapping):
            kept[name] = obeyed(value, f"{key}.")
        elif key.startswith(_COMPILER) and not (value is None or isinstance(value, (bool, int, float))):
            logger.warning(
                "%s of the checkpoint is left out, since it could name a program to run. Set it again if you want it.",
                key,
            )
        elif key not in _NEVER_OBEYED:
            kept[name] = value
    return kept


def read_model(manager: CheckpointManager, source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of this library, or of what another program wrote. Call on all ranks.

    Args:
        manager: Finds and verifies checkpoints of this library.
        source: A name or a path of a checkpoint; or a file with a `state_dict`, a `.safetensors` file, its index, or a directory
            with one of them; or what such a file holds.

    Raises:
        CheckpointMismatch: If there are no weights in it.
    """
    if isinstance(source, Mapping):
        return weights_in(source, "a mapping")
    path = manager.bring_file(source) or Path(source)
    if manager.on_main(lambda: _is_foreign(path)):
        foreign = manager.on_all(lambda: import_weights(path))
        manager.release()
        return foreign
    payload = manager.load_checkpoint(source, sections=["model", "state"])
    manager.release()
    weights = payload.get("model")
    if not isinstance(weights, Mapping):
        raise CheckpointMismatch(f"Expected a checkpoint with a model. Received: {source} with {sorted(payload)}.")
    logger.info("%s holds the weights of %s.", source, moment(payload))
    return dict(weights)


def moment(payload: Mapping[str, object]) -> str:
    """Return the step and epoch of a payload as readable text."""
    state = payload.get("state")
    train = state.get("train") if isinstance(state, Mapping) else None
    if not isinstance(train, Mapping):
        return "a step that is not recorded"
    return f"step {train.get('global_step')}, epoch {train.get('epoch')}"


def _is_foreign(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    pointer = is_name(path.name) and (path.parent / TARGETS).is_dir()
    if not path.is_file() or pointer or has_sums(path):
        return False
    return path.name.endswith((".safetensors", ".index.json")) or not holds_format(path)
