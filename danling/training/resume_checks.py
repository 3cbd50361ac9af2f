"""Which checkpoints a run refuses to continue from, and what it logs about those that it takes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from danling.checkpoints.reading import ExcludedFromLoading
from danling.checkpoints.torch_files import CHANGED_SINCE, FORMAT_VERSION
from danling.config import identity
from danling.data import DataLoader

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")


def check_complete(
    payload: Mapping[str, object], excluded: Collection[str], needed: Iterable[str]
) -> None:
    """Refuse a payload that lacks a component which this run has."""
    missing = [name for name in needed if name not in payload and name not in excluded]
    if missing:
        raise CheckpointMismatch(
            f"Expected a full checkpoint. Received one without: {', '.join(missing)}. Name them in "
            "checkpoint.exclude_from_loading to start without their saved state, or load only the weights with `pretrained`."
        )


def check_payload(payload: object, what: str) -> None:
    """Refuse what a hook returned in the place of a payload."""
    if not isinstance(payload, Mapping):
        raise ValueError(
            f"Expected {what}, a mapping. Received: {payload!r}. Return that of super()."
        )


def check_given(payload: Mapping[str, object], excluded: ExcludedFromLoading) -> None:
    """Refuse a mapping that is no payload, such as bare weights."""
    if "state" not in payload and "state" not in excluded.entries:
        raise CheckpointMismatch(
            f"Expected the payload of a checkpoint, with the entries 'runner' and 'state'. Received: {sorted(map(str, payload))[:8]}. "
            "Load weights alone with `load_model`, or with `load_pretrained` from a file."
        )


def check_same_run(runner: BaseRunner, payload: Mapping[str, Any]) -> None:
    """Refuse a checkpoint from which this run could not continue as the same run."""
    excluded, differences = runner.run_state.excluded, runner.config_differences(payload)
    # Where the configuration differs, that says more than its consequences for passes.
    if not differences and not excluded.allows_setting("dataloader.drop_last"):
        differences = _differences_of_passes(runner, payload.get("dataloaders", {}))
    found = [line for line in differences if not excluded.allows_setting(line.partition(":")[0])]
    if found:
        listing = "\n  ".join(found)
        raise CheckpointMismatch(
            f"Expected the configuration that the checkpoint was made with. Received other values for:\n  {listing}\n"
            "Restore them, add 'runner.' and the key to checkpoint.exclude_from_loading where you mean to change it, or start a "
            "new run from the weights with `pretrained`."
        )
    stored = runner.config.completed(payload.get("runner", {}))
    compiled = identity.compile_differences(stored, runner.config.plain())
    # Compiled code rounds differently, which changes bits and not the run: named, not refused.
    if compiled and runner.placement.optimizer.rank == 0:
        logger.warning(
            "The run continues, but it is no longer bitwise reproducible: its checkpoint was made with differently compiled code (%s).",
            "; ".join(compiled),
        )


def _differences_of_passes(runner: BaseRunner, stored: Mapping[str, object]) -> list[str]:
    """Return where another division leaves out other samples at the end of a pass, though updates have one size, one line a split."""
    lines = []
    for split in runner.train_splits:
        loader, state = runner.dataloaders.get(split), stored.get(split) or {}
        if not isinstance(state, Mapping):
            raise CheckpointDamaged(
                f"Expected a mapping as dataloaders.{split}. Received: {type(state).__name__}."
            )
        before = state.get("end")
        if before is None or not isinstance(loader, DataLoader):
            continue
        is_same_length = state.get("length") == loader.order.length
        if is_same_length and before != loader.order.end:
            lines.append(
                f"dataloader.batch_size: stored passes of {before} out of {loader.order.length} samples over split {split!r}, "
                f"now of {loader.order.end} (drop_last leaves out what does not fill batch_size x ranks: keep that product too)"
            )
    return lines


def log_exclusions(
    excluded: ExcludedFromLoading, loaded_since: Collection[str], *, was_named: bool
) -> None:
    """Log which parts are not loaded, and which entries of `checkpoint.exclude_from_loading` do not count."""
    if loaded_since:
        level = logging.WARNING if was_named else logging.INFO
        logger.log(
            level,
            "%s is loaded: checkpoint.exclude_from_loading left it out when this run began, and the checkpoint has what the run has "
            "trained since. `pretrained` loads the weights of a checkpoint without it.",
            ", ".join(loaded_since),
        )
    if excluded.entries:
        logger.info(
            "Left out, as checkpoint.exclude_from_loading asks for: %s.",
            ", ".join(excluded.entries),
        )


def log_changes_since(payload: Mapping[str, Any]) -> None:
    """Log what this version computes differently than the version that wrote a checkpoint of an older format."""
    version = int(payload.get("format_version", FORMAT_VERSION))
    changes = [text for last, text in CHANGED_SINCE.items() if version <= last]
    if changes:
        logger.warning(
            "The checkpoint has format_version %d, and is read in full. From here on the run differs from what the older version would "
            "have computed: %s.",
            version,
            "; ".join(changes),
        )
