"""How long the command `danling` takes to start: `python benchmarks/command_start.py`.

Prints the median of 15 starts of each, in milliseconds, and of a Python that does nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = (
    ["-c", "pass"],
    ["-m", "danling", "--help"],
    ["-m", "danling", "env"],
    ["-m", "danling", "runs", "."],
    ["-m", "danling", "verify", "."],
    ["-m", "danling", "plot", "--help"],
    ["-m", "danling", "estimate", "--params", "7B"],
)


def start_seconds(arguments: list[str], repeats: int = 15) -> float:
    """Return the median time that a Python with these arguments takes."""
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        times.append(time.perf_counter() - before)
    return statistics.median(times)


if __name__ == "__main__":
    for command in COMMANDS:
        print(f"{1000 * start_seconds(command):6.0f} ms  python {' '.join(command)}")
