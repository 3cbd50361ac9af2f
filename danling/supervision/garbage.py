"""Garbage collection at step boundaries, so that all ranks pause at the same time."""

from __future__ import annotations

import gc

_FULL_EVERY = 10
_OLDEST = 2


class GcPacer:
    """Collects garbage every so many updates instead of whenever Python decides.

    A collection that hits one rank in the middle of a step holds up all the others. The method is TorchTitan's
    (`torchtitan/tools/utils.py`, `GarbageCollection`); besides, every tenth collection is of the oldest generation,
    since cycles that have grown old would otherwise never be freed while automatic collection is off.

    Args:
        interval: Updates between two collections.
        generation: Oldest generation that a usual collection covers: 0, 1 or 2.
        disable_automatic: Switch automatic collection off until `close`.

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
        self._updates = 0
        self._collections = 0
        self._restore = disable_automatic and gc.isenabled()
        if disable_automatic:
            # What construction left behind goes now, once, rather than in the first steps.
            gc.collect()
            gc.disable()

    def step(self) -> None:
        """Count an update, and collect when the interval is full. Called on all ranks at the same boundary."""
        self._updates += 1
        if self._updates >= self.interval:
            self._updates = 0
            self._collect()

    def close(self) -> None:
        """Switch automatic collection on again, if it was on before. A second call does nothing."""
        if self._restore:
            self._restore = False
            gc.enable()

    def _collect(self) -> None:
        self._collections += 1
        gc.collect(_OLDEST if self._collections % _FULL_EVERY == 0 else self.generation)
