"""Python's garbage collection at update boundaries, where all ranks pay for it together."""

from __future__ import annotations

import gc


class GcPacer:
    """Collects every so many updates.

    Args:
        interval: Updates between collections.
        generation: Generation to collect; the oldest one is collected every tenth time, so that nothing piles up there.
        disable_automatic: Switch Python's own collections off until `close`.
    """

    def __init__(self, interval: int, *, generation: int = 1, disable_automatic: bool = True) -> None:
        self._interval = interval
        self._generation = generation
        self._updates = 0
        self._restores = disable_automatic and gc.isenabled()
        if self._restores:
            gc.disable()

    def step(self) -> None:
        """Count an update, and collect when it is time."""
        self._updates += 1
        if self._updates % self._interval:
            return
        oldest = self._updates % (self._interval * 10) == 0
        gc.collect(2 if oldest else self._generation)

    def close(self) -> None:
        """Give collections back to Python."""
        if self._restores:
            gc.enable()
            self._restores = False
