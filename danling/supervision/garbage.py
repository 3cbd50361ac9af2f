"""Garbage collection at step boundaries, so that all ranks pause at the same time."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.training.outcome import UpdateOutcome

_FULL_EVERY = 10
_OLDEST = 2


class GcPacer(Observer):
    """Collects garbage every so many updates or batches instead of whenever Python decides.

    A collection that hits one rank in the middle of a step holds up all the others. The method is TorchTitan's
    (`torchtitan/tools/utils.py`, `GarbageCollection`); besides, every tenth collection is of the oldest generation,
    since cycles that have grown old would otherwise never be freed while automatic collection is off.

    Automatic collection is off in trainings and evaluations only; outside the process has its own setting.
    """

    def __init__(
        self, interval: int, *, generation: int = 1, disable_automatic: bool = True
    ) -> None:
        self.interval = interval
        self.generation = generation
        self.disable_automatic = disable_automatic
        self._updates = self._depth = 0
        self._was_enabled = self._has_been_active = False

    def training_started(self) -> None:
        # A training contains evaluations, and an evaluation may be called alone.
        self._depth += 1
        if self._depth == 1 and self.disable_automatic:
            self._was_enabled = gc.isenabled()
            if self._was_enabled and not self._has_been_active:
                # What construction left behind is freed now, once, rather than in the first steps.
                self._has_been_active = True
                gc.collect()
            gc.disable()

    def training_ended(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._was_enabled:
            self._was_enabled = False
            gc.enable()

    def evaluation_started(self, split: str) -> None:
        self.training_started()

    def evaluation_batch_started(self, split: str, number: int) -> None:
        """Collect after every so many batches, counted apart from the updates.

        The ranks may have different numbers of batches, and must go on collecting at the same updates.
        """
        if number:
            self._collect_after(number)

    def evaluation_ended(self, split: str) -> None:
        self.training_ended()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self.boundary_reached()

    def boundary_reached(self) -> None:
        self._updates += 1
        self._collect_after(self._updates)

    def _collect_after(self, done: int) -> None:
        collections, rest = divmod(done, self.interval)
        if not rest:
            gc.collect(_OLDEST if collections % _FULL_EVERY == 0 else self.generation)
