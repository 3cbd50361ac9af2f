"""The tenths of the slow tests, of which CI runs another one after every commit."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable


def tenths_of(names: Iterable[str]) -> list[int]:
    """Return a digit for each test.

    The variants of a test take about as long as each other, and go to different tenths. A new test leaves all others where they are.
    """
    variants: Counter[str] = Counter()
    digits = []
    for name in names:
        function = name.partition("[")[0]
        digits.append((zlib.crc32(function.encode()) + variants[function]) % 10)
        variants[function] += 1
    return digits
