"""A small file that says that a rank is alive, and since when it has made no progress."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from danling.utils.files import write_atomically


class Heartbeat:
    """Writes `rank-{rank}.json` every so often from a thread of its own.

    The thread goes on when the main thread is stuck, so the file also says when that made its last step.

    Args:
        directory: Where the files of all ranks lie.
        rank: Global rank.
        interval_seconds: Time between two writes.
    """

    def __init__(self, directory: Path, *, rank: int, interval_seconds: float) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / f"rank-{rank}.json"
        self._interval = interval_seconds
        self._rank = rank
        self._step, self._epoch, self._stepped_at = 0, 0, time.time()
        self._ended = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._run, name="danling-heartbeat", daemon=True)
        self._thread.start()

    def beat(self, global_step: int, epoch: int) -> None:
        """Say that the main thread has made an update."""
        self._step, self._epoch, self._stepped_at = global_step, epoch, time.time()

    def write(self) -> None:
        """Write the file now."""
        now = time.time()
        entry = {
            "rank": self._rank,
            "pid": os.getpid(),
            "global_step": self._step,
            "epoch": self._epoch,
            "time": now,
            "last_step_time": self._stepped_at,
            "seconds_without_step": round(now - self._stepped_at, 3),
        }
        write_atomically(self.file, json.dumps(entry) + "\n")

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.write()

    def stop(self) -> None:
        """End the thread and write the last state."""
        self._ended.set()
        self._thread.join()
        self.write()
