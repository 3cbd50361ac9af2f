"""Encoded values of all ranks in one checkpoint: once where they are equal, and for each rank where they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from danling.checkpoints.errors import CheckpointMismatch
from danling.distributed import Domain
from danling.utils.encoding import MISSING

from .attribute_snapshot import Entry, Key


def values_of_all(
    world: Domain, mine: Collection[Key], now: Mapping[Key, Entry]
) -> dict[str, dict[str, Any]]:
    """Return the entries of a checkpoint by section and name. Called on all ranks.

    Args:
        world: All ranks.
        mine: What this rank would save. What any rank would save is saved.
        now: The encoded values of this rank.
    """
    # All ranks must gather the same keys, whatever each of them has changed.
    keys = sorted(set().union(*world.gather_objects(set(mine))))
    if not keys:
        return {}
    ranks = world.gather_objects([now[key].digest if key in now else None for key in keys])
    digests = dict(zip(keys, map(set, zip(*ranks))))
    differing = [key for key in keys if len(digests[key]) > 1]
    nodes = []
    # Most values are equal on all ranks: only digests travel for these.
    if differing:
        mine_of_these = {key: now[key].node for key in differing if key in now}
        nodes = world.gather_objects(tree_map_only(Tensor, Tensor.cpu, mine_of_these))
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        values = {str(rank): each[key] for rank, each in enumerate(nodes) if key in each}
        if key not in differing:
            entries: dict[str, Any] = {"value": now[key].node}
        elif key[0] != "attributes" and len(digests[key] - {None}) == 1:
            # Parts of a pipeline have tensors of other names: what those have that have it is equal.
            entries = {"value": next(iter(values.values()))}
            if key[0] == "observers":
                # An observer that was removed on a rank, since it failed there, may have had another state than the others.
                entries |= {
                    "of": world.size,
                    "without": [rank for rank in range(world.size) if str(rank) not in values],
                }
        else:
            entries = {"of": world.size, "ranks": values}
        found.setdefault(key[0], {})[key[1]] = entries
    return found


def value_of_rank(world: Domain, section: str, name: str, entry: Mapping[str, Any]) -> Any:
    """Return this rank's value of an entry; `MISSING` where the rank had none when it was saved. No communication."""
    if "value" in entry:
        had_none = entry.get("of") == world.size and world.rank in entry.get("without", ())
        return MISSING if had_none else entry["value"]
    if entry["of"] != world.size:
        what = f"the observer {name!r}" if section == "observers" else f"self.{name}"
        raise CheckpointMismatch(
            f"Expected {entry['of']} processes: the checkpoint has a value of {what} for each of them. Received: {world.size}. "
            f"Resume on as many, or add '{section}.{name}' to checkpoint.exclude_from_loading, which keeps the value of the program."
        )
    return entry["ranks"].get(str(world.rank), MISSING)
