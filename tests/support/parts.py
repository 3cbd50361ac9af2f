"""The parts of tests of which CI runs another one after every commit: tenths of the slow ones, thirds with other releases of torch."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable


def parts_of(names: Iterable[str], count: int) -> list[int]:
    """Return the part of each test, from 0 to `count` - 1.

    The variants of a test take about as long as each other, and go to different parts. A new test leaves all others where they are.
    """
    variants: Counter[str] = Counter()
    digits = []
    for name in names:
        function = name.partition("[")[0]
        digits.append((zlib.crc32(function.encode()) + variants[function]) % count)
        variants[function] += 1
    return digits
