"""Numbers as people write them, and how often to write them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Paced:
    """Says whether a line is due: the first ones are, then one in so many seconds."""

    def __init__(self, seconds: float, *, burst: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self._left = burst
        self._clock = clock
        self._next = -math.inf

    def due(self) -> bool:
        """Return whether a line may be written now, and count it if so."""
        now = self._clock()
        if self._left <= 0 and now < self._next:
            return False
        self._left -= 1
        self._next = now + self.seconds
        return True


def format_count(value: float) -> str:
    """Return a number as people write it: three digits, with `k`, `M`, `G` or `T` for what is large.

    Examples:
        >>> [format_count(value) for value in (0.4567, 12, 735.3, 5123, 19_210, 2.5e9)]
        ['0.457', '12', '735', '5.1k', '19k', '2.5G']
    """
    for exponent, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**exponent:
            scaled = value / 10**exponent
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    return f"{value:.3g}"
