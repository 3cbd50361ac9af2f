"""A file per rank that says that the process lives, and since when its main thread has made no step."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from danling.utils.files import write_atomically
from danling.utils.messages import clause
from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.training.outcome import UpdateOutcome

logger = logging.getLogger("danling")


class Heartbeat(Observer):
    """Writes `rank-{rank}.json` into a directory now, every interval, and at the end.

    A daemon thread writes, so the file also tells of a main thread that hangs: `time` advances while `seconds_without_step` grows. When
    the whole process is gone or stopped, `time` does not advance. Each write replaces the file as a whole.

    The file holds `rank`, `pid`, `host`, `status` (`running`, or `stopped` once the run has closed), `global_step`,
    `epoch`, `time` (seconds since 1970), `last_step_time` (likewise; `null` before the first step),
    `seconds_without_step` (since the start, before the first step) and `interval_seconds`.

    Raises:
        OSError: If the first file cannot be written. Later failures are told in the log once, and training goes on.
    """

    def __init__(
        self, runner: BaseRunner, directory: str | os.PathLike[str], interval_seconds: float = 60.0
    ) -> None:
        self._runner = runner
        self.interval_seconds = interval_seconds
        self.file = Path(directory) / f"rank-{runner.rank}.json"
        self._host = socket.gethostname()
        self._stepped_at = time.monotonic()
        self._has_stepped = False
        self._complained = False
        self._stopping = threading.Event()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Here, and not in the thread: a place that cannot be written is an error of the configuration.
        self._write("running")
        self._thread = threading.Thread(target=self._run, name="danling-heartbeat", daemon=True)
        self._thread.start()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self.beat()

    def boundary_reached(self) -> None:
        self.beat()

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self.beat()

    def beat(self) -> None:
        """Note that the main thread makes progress."""
        self._stepped_at = time.monotonic()
        self._has_stepped = True

    def stop(self, timeout: float | None = 10.0) -> None:
        """End the thread and write the file a last time, with the status `stopped`. A second call does nothing.

        Args:
            timeout: Seconds to wait for a write that is under way; `None` waits.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout)
        # A write that hangs, as on a network disk, would replace this one later.
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
                logger.warning(
                    "The heartbeat %s cannot be written: %s. The training continues.",
                    self.file,
                    clause(error),
                )

    def _write(self, status: str) -> None:
        train = self._runner.state.train
        now, idle = time.time(), time.monotonic() - self._stepped_at
        record = {
            "rank": self._runner.rank,
            "pid": os.getpid(),
            "host": self._host,
            "status": status,
            "global_step": train.global_step,
            "epoch": train.epoch,
            "time": round(now, 3),
            "last_step_time": round(now - idle, 3) if self._has_stepped else None,
            "seconds_without_step": round(idle, 3),
            "interval_seconds": self.interval_seconds,
        }
        write_atomically(self.file, json.dumps(record) + "\n")
