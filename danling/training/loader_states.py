"""The states of loaders in a checkpoint: one position for all ranks, or a state of its own on each data replica."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from danling.data import BatchSource, DataLoader

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")


def restore_positions(runner: BaseRunner, states: Mapping[str, Mapping[str, object] | None]) -> None:
    """Restore the positions of this rank in the loaders of the splits to train on."""
    for split in runner.train_splits:
        if split not in states:
            raise CheckpointMismatch(
                f"Expected the loader state of split {split!r}. Received: splits={sorted(states)}. Add "
                f"'dataloaders' to checkpoint.exclude_from_loading to start it from its beginning."
            )
        stored = states[split]
        own = share_of_rank(runner, split, stored) if stored is not None else None
        if own is not None:
            runner.source(split).load_state_dict(own)


def share_of_rank(runner: BaseRunner, split: str, state: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return this rank's share of the state of a loader; `None` where the loader is to start from its beginning."""
    domain, inexact = runner.data_domain, bool(runner.config.parallel.allow_degree_change)
    return share_of(state, split, rank=domain.rank, size=domain.size, inexact=inexact)


def own_states(sources: Mapping[str, BatchSource], *, read_only: bool = True) -> dict[str, Any]:
    """Return the states of loaders that differ from rank to rank, by split."""
    return {
        s: source.state_dict()
        for s, source in sources.items()
        if source.is_rank_local and (source.reads or not read_only)
    }


def states_of_all(
    sources: Mapping[str, BatchSource], ranks: Iterable[tuple[int, Mapping[str, object]]]
) -> dict[str, dict[str, Any]]:
    """Return what is saved of the loaders of some splits."""
    gathered = list(ranks)
    return {split: state_of(split, source, gathered) for split, source in sources.items()}


def state_of(split: str, source: BatchSource, ranks: Iterable[tuple[int, Mapping[str, object]]]) -> dict[str, object]:
    """Return what is saved of one loader: its position, or the states of all data replicas under `ranks`."""
    if not source.is_rank_local:
        return source.state_dict()
    return {"ranks": {str(replica): states[split] for replica, states in reversed(list(ranks)) if split in states}}


def share_of(state: Mapping[str, Any], split: str, *, rank: int, size: int, inexact: bool) -> Mapping[str, Any] | None:
    """Return the share of one data replica of what `state_of` returned; `None` where its loader is to start from its beginning."""
    if "ranks" not in state:
        return state
    ranks = state["ranks"]
    if len(ranks) == size:
        own: Mapping[str, Any] = ranks[str(rank)]
        return own
    received = f"the loader of split {split!r} keeps a state of its own on each of {len(ranks)} data replicas"
    if inexact:
        logger.warning("%s, and there are %d now: it starts anew.", received, size)
        return None
    raise CheckpointMismatch(
        f"Expected {len(ranks)} data replicas: {received}, which cannot be divided anew. Received: {size}. Let "
        "the library build the loader from a dataset, or exclude 'dataloaders' from loading."
    )


def differences_of_passes(stored: Mapping[str, Any], loaders: Mapping[str, object]) -> list[str]:
    """Return where another division leaves out other samples at the end of a pass, though updates have one size, one line a split."""
    lines = []
    for split, loader in loaders.items():
        state = stored.get(split) or {}
        if not isinstance(state, Mapping):
            raise CheckpointDamaged(f"Expected a mapping as dataloaders.{split}. Received: {type(state).__name__}.")
        before = state.get("end")
        if before is None or not isinstance(loader, DataLoader) or state.get("length") != loader.positions.length:
            continue
        if before != loader.positions.end:
            lines.append(
                f"dataloader.batch_size: stored passes of {before} out of {loader.positions.length} samples over split {split!r}, "
                f"now of {loader.positions.end} (drop_last leaves out what does not fill batch_size x ranks: keep that product too)"
            )
    return lines
