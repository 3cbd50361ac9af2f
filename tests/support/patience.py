"""How long a test waits before it takes something for a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def patience(seconds: float) -> float:
    """Return a time limit for this machine at this moment: as many times longer as each core has processes to run."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + patience(30)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
