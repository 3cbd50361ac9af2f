"""The random streams of all ranks of a run: whether they have been drawn from, and which of them a rank goes on with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .plain_state import is_equal
from .randomness import (
    capture_random_state,
    derive_seed,
    preserved_random_state,
    restore_random_state,
    seed_streams,
)

logger = logging.getLogger("danling")


class RankStreams:
    """The random streams of this rank among those of the run.

    Args:
        place: Returns the index of the streams of this rank; ranks with one index draw the same numbers.
        number: Returns how many streams of one kind a checkpoint of this run holds.
        layout: Returns what has streams of its own, and how many of it; runs in which it is the same draw the same numbers.
        seed: Returns the base seed of the run.
        device: Returns the device, whose stream is kept too.

    Attributes:
        seed_is_drawn: Whether the seed was left open, and is that of the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        *,
        place: Callable[[], int],
        number: Callable[[], int],
        layout: Callable[[], Mapping[str, int]],
        seed: Callable[[], int],
        device: Callable[[], torch.device],
    ) -> None:
        self.seed_is_drawn = False
        self._place, self._number, self._layout = place, number, layout
        self._seed, self._device = seed, device

    @property
    def layout(self) -> dict[str, int]:
        """What has random streams of its own, and how many of it."""
        return dict(self._layout())

    def begin(self) -> None:
        """Seed the streams of the forward, by their index: dropout masks must differ from data rank to data rank."""
        seed_streams(derive_seed(self._seed(), "forward", self._place()))

    def capture(self) -> tuple[int, dict[str, Any]]:
        """Return the index of the streams of this rank and what they are now."""
        return self._place(), capture_random_state(self._device())

    def would_differ(self, layout: Mapping[str, int] | None, stored: Mapping[str, object]) -> bool:
        """Whether a run that goes on here would draw other numbers than the one that was stored.

        Args:
            layout: What had streams of its own in that run; `None` where it is not known.
            stored: Its streams by index.
        """
        return bool(layout) and layout != self.layout and self._have_drawn(stored)

    def resume(self, stored: Mapping[str, object], *, step: int, speaks: bool) -> None:
        """Go on with the stored streams of this rank; say so where their number is another one.

        Args:
            stored: Streams by index, as `streams_by_index` returns them.
            step: Committed updates at the checkpoint.
            speaks: Whether this process tells the log.
        """
        number = self._number()
        # Each replica group saves its own ranks, and begins with new streams where another one has saved.
        if speaks and stored and len(stored) != number and self._have_drawn(stored):
            logger.info(
                "The checkpoint holds random streams of %d ranks and this run has %d: old ranks keep theirs, new ones are "
                "seeded from (seed, step, rank).",
                len(stored),
                number,
            )
        resume_stream(stored, self._place(), seed=self._seed(), step=step, device=self._device())

    def _have_drawn(self, stored: Mapping[str, object]) -> bool:
        return have_drawn(stored, seed=self._seed(), device=self._device())


def streams_by_index(ranks: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the streams of a run by their index; of ranks that draw the same numbers, those of the first one.

    Args:
        ranks: Index and captured streams, in rank order.
    """
    return {str(index): streams for index, streams in reversed(list(ranks))}


def have_drawn(stored: Mapping[str, object], *, seed: int, device: torch.device) -> bool:
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
