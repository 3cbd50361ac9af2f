"""Reading parts of a checkpoint without a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from .archive import is_archive
from .errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, disk_error
from .file_store import SUMS, FileStore, has_sums, verify_alone
from .policy import is_name
from .target_store import TARGETS, TargetStore

if TYPE_CHECKING:
    from .base import CheckpointManager

logger = logging.getLogger("danling")

FORMAT_VERSION = 1
"""The newest `format_version` that can be read."""


def read_payload(
    path: Path,
    *,
    template: Mapping[str, Any] | None = None,
    sections: Iterable[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, a file or a directory, onto the CPU, without running anything that is in it. Verifies nothing.

    Args:
        path: The file, or the target directory.
        template: See `CheckpointManager.load_checkpoint`.
        sections: Components to return; `None` returns all.
        mmap: Leave the tensors of a file on disk until they are used.
        trust: Let DeepSpeed put the shares of an engine together, which runs what is in its files.

    Raises:
        CheckpointDamaged: If torch cannot read it.
        CheckpointError: If it takes trust to read it.
        CheckpointMismatch: If it is no checkpoint of this library, or of a format that this version does not know.
    """
    wanted = None if sections is None else {*sections, "format_version"}
    if path.is_dir():
        from .deepspeed_files import is_engine_target, read_engine_target

        if is_engine_target(path):
            return read_engine_target(path, sections=wanted, trust=trust)
        from .dcp_files import read_target

        return check_format(read_target(path, template=template, sections=wanted), path)
    payload = check_format(read_file(path, mmap=mmap), path)
    return {name: value for name, value in payload.items() if wanted is None or name in wanted}


def read_file(path: Path, *, mmap: bool = False) -> Any:
    """Read any file of `torch.save`, with torch's safe reader.

    Raises:
        CheckpointDamaged: If torch cannot read it.
        CheckpointDiskError: If the file system does not let it.
    """
    try:
        # The older format of torch.save is no zip file, and can only be read whole.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zipfile(path))
    except OSError as error:
        raise disk_error("read", path, error) from error
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a file of torch.save. Received: {path}, {_why_unreadable(path, error)}"
        ) from error


def _why_unreadable(path: Path, error: Exception) -> str:
    # torch answers with paragraphs, colours and the advice to run what is in the file.
    if path.with_name(path.name + SUMS).is_file():
        return f"which torch cannot read; `danling verify {path}` tells whether it is damaged."
    forbidden = re.search(r"Unsupported (?:global: GLOBAL|class) ([\w.]+\w)", str(error))
    if forbidden:
        return f"which holds an object of {forbidden[1]}, and objects of classes are not read; save its state_dict() instead."
    reason = (
        str(error).splitlines()[0] if str(error) and isinstance(error, (OSError, RuntimeError, MemoryError)) else ""
    )
    if reason and "weights_only" not in reason and "\x1b" not in reason:
        return f"which torch cannot read: {reason.rstrip('.')}."
    return "which is damaged, or something else."


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


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read.

    Args:
        source: A checkpoint, or a checkpoint or run directory with a `latest`.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If it cannot be read, or a file has another size than was written.
    """
    return dict(read_sections(source, ["runner"])["runner"])


def read_sections(source: str | Path, sections: Iterable[str]) -> dict[str, Any]:
    """Return components of a checkpoint, found as `read_config` finds it; the tensors of a file stay on disk until they are used.

    Args:
        source: As for `read_config`.
        sections: Names of the components.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If it cannot be read, or a file has another size than was written.
    """
    for kind in (FileStore, TargetStore):
        store = kind(Path("checkpoints"), run_id="")
        found = store.locate(Path(source))
        if found is not None:
            store.verify(found, "size")
            return read_payload(store.target(found), sections=sections, mmap=True)
    raise CheckpointNotFound(
        f"Expected a checkpoint file or directory. Received: {str(source)!r}, where there is none."
    )


# The second names compiled code, which runs when it is loaded; options of a compiler name the programs that it runs.
_NEVER_OBEYED = frozenset({"checkpoint.trust", "compile.precompile_artifact_dir"})
_COMPILER = "compile.options."


def obeyed(stored: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a checkpoint less those that would let a file say that it is to be trusted, or what is to be run.

    Args:
        stored: What `read_config` returned.
        prefix: Dotted key that they lie under.
    """
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"  # a name may be dotted itself
        if isinstance(value, Mapping):
            kept[name] = obeyed(value, f"{key}.")
        elif key.startswith(_COMPILER) and not (value is None or isinstance(value, (bool, int, float))):
            logger.warning(
                "%s of the checkpoint is left out: it could name a program that runs. Give it again if it is meant.",
                key,
            )
        elif key not in _NEVER_OBEYED:
            kept[name] = value
    return kept


def read_model(manager: CheckpointManager, source: str | Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of this library, or of what another program wrote. Call on all ranks.

    Args:
        manager: Finds and verifies checkpoints of this library.
        source: A name or a path of a checkpoint; or a file with a `state_dict`, a `.safetensors` file, its index, or a directory
            with one of them.

    Raises:
        CheckpointMismatch: If there are no weights in it.
    """
    if manager.on_main(lambda: _is_foreign(Path(source))):
        from .exchange import import_weights

        return manager.on_all(lambda: import_weights(source))
    payload = manager.load_checkpoint(source, sections=["model", "state"])
    weights = payload.get("model")
    if not isinstance(weights, Mapping):
        raise CheckpointMismatch(f"Expected a checkpoint with a model. Received: {source} with {sorted(payload)}.")
    logger.info("%s holds the weights of %s.", source, moment(payload))
    return dict(weights)


def moment(payload: Mapping[str, Any]) -> str:
    """Return when in its run a payload was saved, as people read it."""
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


def holds_format(path: Path) -> bool:
    """Whether a file is a checkpoint of this library, by what is in it.

    Raises:
        CheckpointDamaged: If it cannot be read, or the sums inside of it are not those of its contents.
    """
    check_foreign(path, "size")
    return is_own(read_file(path, mmap=True))


def is_own(payload: Any) -> bool:
    """Whether a payload was saved by this library."""
    return isinstance(payload, Mapping) and "format_version" in payload


def check_foreign(path: Path, level: str) -> None:
    """Compare a file that need not be of this library with the sums inside of it, where it has some.

    Raises:
        CheckpointDamaged: If they differ.
    """
    if is_archive(path) or is_zipfile(path):
        verify_alone(path, level, required=False)
