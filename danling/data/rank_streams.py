"""The random streams of all ranks of a run: whether they have been drawn from, and which of them a rank goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .randomness import (
    capture_random_state,
    derive_seed,
    preserved_random_state,
    restore_random_state,
    seed_streams,
)


def streams_by_index(ranks: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the streams of a run by their index; of ranks that draw the same numbers, those of the first one.

    Args:
        ranks: Index and captured streams, in rank order.
    """
    return {str(index): streams for index, streams in reversed(list(ranks))}


def have_drawn(stored: Mapping[str, Any], *, seed: int, device: torch.device) -> bool:
    """Whether the forward of a run has drawn random numbers, seen in its streams; one that has drawn none goes on exactly with others.

    Args:
        stored: Streams by index, as `streams_by_index` returns them.
        seed: Base seed of the run.
        device: Of which a stream is compared too.
    """
    for index, streams in stored.items():
        with preserved_random_state(device, seed=derive_seed(seed, "forward", int(index))):
            if not is_equal(streams, capture_random_state(device)):
                return True
    return False


def resume_stream(stored: Mapping[str, Any], index: int, *, seed: int, step: int, device: torch.device) -> None:
    """Go on with the stored streams of an index; one that is not among them is seeded anew.

    Args:
        stored: Streams by index; empty leaves the streams of this process as they are.
        index: Of this rank.
        seed: Base seed of the run.
        step: Committed updates at the checkpoint, from which new streams of a run that draws follow.
        device: Whose stream is restored too.
    """
    if not stored:
        return
    own = stored.get(str(index))
    if own is not None:
        restore_random_state(own, device)
    elif have_drawn(stored, seed=seed, device=device):
        seed_streams(derive_seed(seed, "resumed", step, index))
    else:
        seed_streams(derive_seed(seed, "forward", index))


def is_equal(first: Any, second: Any) -> bool:
    """Whether two nested states of random streams are equal."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)
