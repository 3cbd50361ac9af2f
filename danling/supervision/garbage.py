"""Garbage collection at step boundaries, so that all ranks pause at the same time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_FULL_EVERY = 10
_OLDEST = 2


class GcPacer:
    """Collects garbage every so many updates or batches instead of whenever Python decides.

    A collection that hits one rank in the middle of a step holds up all the others. The method is TorchTitan's
    (`torchtitan/tools/utils.py`, `GarbageCollection`); besides, every tenth collection is of the oldest generation,
    since cycles that have grown old would otherwise never be freed while automatic collection is off.

    Automatic collection is off inside of `active` only; outside the process has its own setting.

    Args:
        interval: Updates, or batches of an evaluation, between two collections.
        generation: Oldest generation that a usual collection covers: 0, 1 or 2.
        disable_automatic: Switch automatic collection off inside of `active`.

    Raises:
        ValueError: If the interval is not positive or there is no such generation.
    """

    def __init__(self, interval: int, *, generation: int = 1, disable_automatic: bool = True) -> None:
        if interval < 1:
            raise ValueError(
                f"Expected gc.interval >= 1. Received: interval={interval!r}. "
                "Set `gc.interval` to none for automatic collection."
            )
        if not 0 <= generation <= _OLDEST:
            raise ValueError(f"Expected gc.generation to be 0, 1 or 2. Received: generation={generation!r}.")
        self.interval = interval
        self.generation = generation
        self.disable_automatic = disable_automatic
        self._updates = 0
        self._has_been_active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch automatic collection off inside, and put it back as it was on exit. May be entered inside of itself."""
        before = gc.isenabled()
        if not self.disable_automatic or not before:
            yield
            return
        if not self._has_been_active:
            # What construction left behind goes now, once, rather than in the first steps.
            self._has_been_active = True
            gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def step(self) -> None:
        """Count an update, and collect when the interval is full. Called on all ranks at the same boundary."""
        self._updates += 1
        self._collect_after(self._updates)

    def paced(self, batches: Iterator[_T]) -> Iterator[_T]:
        """Yield batches, and collect after every so many of them, counted apart from the updates.

        The ranks may have different numbers of batches, and must go on collecting at the same updates.

        Args:
            batches: What is evaluated.
        """
        for done, batch in enumerate(batches, 1):
            yield batch
            del batch
            self._collect_after(done)

    def _collect_after(self, done: int) -> None:
        collections, rest = divmod(done, self.interval)
        if not rest:
            gc.collect(_OLDEST if collections % _FULL_EVERY == 0 else self.generation)
