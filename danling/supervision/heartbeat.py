"""A file per rank that says that the process lives, and since when its main thread has made no step."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from pathlib import Path

from danling.utils.files import write_atomically

logger = logging.getLogger("danling")


class Heartbeat:
    """Writes `rank-{rank}.json` into a directory now, every interval, and at the end.

    A daemon thread writes, so the file also tells of a main thread that hangs: `time` goes on while
    `seconds_without_step` grows. When the whole process is gone or stopped, `time` stands still. Each write replaces
    the file as a whole.

    The file holds `rank`, `pid`, `host`, `status` (`running`, or `stopped` once the run has closed), `global_step`,
    `epoch`, `time` (seconds since 1970), `last_step_time` (likewise; `null` before the first step),
    `seconds_without_step` (since the start, before the first step) and `interval_seconds`.

    Args:
        directory: Directory of the files; it is created.
        rank: Global rank of this process.
        interval_seconds: Seconds between two writes.

    Raises:
        ValueError: If the interval is not positive.
        OSError: If the first file cannot be written. Later failures are told in the log once, and training goes on.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int = 0, interval_seconds: float = 60.0) -> None:
        if interval_seconds <= 0:
            raise ValueError(
                f"Expected heartbeat.interval_seconds > 0. Received: interval_seconds={interval_seconds!r}. "
                "Set `heartbeat.enabled` to false for none."
            )
        self.rank = rank
        self.interval_seconds = interval_seconds
        self.file = Path(directory) / f"rank-{rank}.json"
        self._host = socket.gethostname()
        self._last: tuple[int | None, int | None, float] = (None, None, time.monotonic())
        self._complained = False
        self._stopping = threading.Event()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._write("running")
        self._thread = threading.Thread(target=self._run, name="danling-heartbeat", daemon=True)
        self._thread.start()

    def beat(self, global_step: int, epoch: int) -> None:
        """Say that a step is done, be it that it was skipped; called at every update, costs a fraction of a microsecond and writes nothing.

        Args:
            global_step: Optimizer updates committed.
            epoch: Completed epochs.
        """
        self._last = (global_step, epoch, time.monotonic())

    def stop(self, timeout: float | None = 10.0) -> None:
        """End the thread and write the file a last time, with the status `stopped`. A second call does nothing.

        Args:
            timeout: Seconds to wait for a write that is under way; `None` waits.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._try_write("stopped")

    def _run(self) -> None:
        while not self._stopping.wait(self.interval_seconds):
            self._try_write("running")

    def _try_write(self, status: str) -> None:
        try:
            self._write(status)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("The heartbeat %s cannot be written: %s. Training goes on.", self.file, error)

    def _write(self, status: str) -> None:
        # The tuple is read once: the main thread may replace it meanwhile.
        global_step, epoch, stepped_at = self._last
        now, idle = time.time(), time.monotonic() - stepped_at
        record = {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": self._host,
            "status": status,
            "global_step": global_step,
            "epoch": epoch,
            "time": round(now, 3),
            "last_step_time": None if global_step is None else round(now - idle, 3),
            "seconds_without_step": round(idle, 3),
            "interval_seconds": self.interval_seconds,
        }
        write_atomically(self.file, json.dumps(record) + "\n")
