"""Reads a checkpoint of any kind, or parts of it, without a runner."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .directory import SUFFIX, CheckpointStore, is_engine_target, stores_in
from .errors import CheckpointError, CheckpointMismatch, CheckpointNotFound

if TYPE_CHECKING:
    from .manager import CheckpointManager
    from .outline import Outline

logger = logging.getLogger("danling")

READERS = {
    "file": "danling.checkpoints.torch_files",
    "dcp": "danling.checkpoints.dcp",
    "deepspeed": "danling.deepspeed.checkpoints",
}
"""By the kind of a checkpoint: the module whose `read_payload` and `read_outline` read it. They are named and not imported: torch takes
its time, to verify a checkpoint needs none of it, and the core imports no extension."""


def manager_named(backend: str) -> type[CheckpointManager]:
    """Return the manager that writes checkpoints of a backend."""
    import danling.checkpoints as managers

    return managers.FileCheckpointManager if backend == "file" else managers.TorchDistributedCheckpointManager


def _reader(path: Path) -> Any:
    kind = "file" if not path.is_dir() else "deepspeed" if is_engine_target(path) else "dcp"
    return import_module(READERS[kind])


def locate(source: str | Path) -> tuple[CheckpointStore, Path]:
    """Return the checkpoint that a path means: a file, a pointer, a target, or `latest` of a checkpoint or run directory."""
    # Only the name of the directory matters here: it is looked for in a run directory.
    for store in stores_in(Path("checkpoints")):
        found = store.locate(Path(source))
        if found is not None:
            return store, found
    if is_of_ranks(Path(source)):
        raise CheckpointMismatch(
            f"Expected a checkpoint of this library. Received: {str(source)!r}, a directory of torch_checkpointing, of which the weights "
            "alone are read. Name it in `pretrained`, or write them to a file: danling export."
        )
    raise CheckpointNotFound(
        f"Expected a checkpoint file or directory. Received: {str(source)!r}, where there is none."
    )


def is_of_ranks(path: Path) -> bool:
    """Whether a path is a directory that `torch_checkpointing` wrote, with weights in files of ranks."""
    ours = any((path / name).is_file() for name in ("model_0.pt", "metadata.pkl"))
    return ours and not any(path.glob("model.safetensors*"))


def read_payload(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: Iterable[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, a file or a target, onto the CPU, without running anything that is in it. Verifies nothing."""
    wanted = None if sections is None else frozenset({*sections, "format_version"})
    payload: dict[str, Any] = _reader(path).read_payload(
        path, template=template, sections=wanted, mmap=mmap, trust=trust
    )
    return payload


def read_outline(path: Path) -> Outline:
    """Return the content of a file or a target; the values of its tensors stay on disk."""
    outline: Outline = _reader(path).read_outline(path)
    return outline


def read_sections(source: str | Path, sections: Iterable[str]) -> dict[str, Any]:
    """Return components of a checkpoint, found as `read_config` finds it; the tensors of a file stay on disk until they are used."""
    store, found = locate(source)
    store.verify(found, "size")
    return read_payload(store.target(found), sections=sections, mmap=True)


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read.

    Args:
        source: A checkpoint, or a checkpoint or run directory with a `latest`.
    """
    config = read_sections(source, ["runner"]).get("runner")
    if not isinstance(config, Mapping):
        raise CheckpointMismatch(
            f"Expected a checkpoint with the configuration of a run. Received: {source}, without one."
        )
    return dict(config)


def stored_seed(directory: Path, asked: str | Path | None) -> int | None:
    """Return the seed of the checkpoint that a run will resume from, so that construction draws the same random numbers again."""
    sources = _usual(directory) if asked is None else [Path(asked), directory / asked, directory / f"{asked}{SUFFIX}"]
    for source in sources:
        try:
            seed = read_config(source).get("seed")
        except (CheckpointError, OSError):
            continue
        return int(seed) if seed is not None else None
    return None


def stored_settings(directory: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the configuration in the newest readable checkpoint of a directory, and how many ranks with different samples made it."""
    for source in _usual(directory):
        try:
            payload = read_sections(source, ["runner", "state"])
        except (CheckpointError, OSError):
            continue
        elastic = (payload.get("state") or {}).get("elastic") or {}
        return payload.get("runner") or {}, int(elastic.get("data_replicas", elastic.get("world_size", 1)))
    return None


def _usual(directory: Path) -> list[Path]:
    return [directory / name for name in ("latest", f"latest{SUFFIX}", "best", f"best{SUFFIX}")]


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


def moment(payload: Mapping[str, object]) -> str:
    """Return the step and epoch of a payload as readable text."""
    state = payload.get("state")
    train = state.get("train") if isinstance(state, Mapping) else None
    if not isinstance(train, Mapping):
        return "a step that is not recorded"
    return f"step {train.get('global_step')}, epoch {train.get('epoch')}"
