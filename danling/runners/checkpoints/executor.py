"""Background writing: one at a time, in order, and nothing that goes wrong is lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Job:
    run: Callable[[], None]
    reliable: bool


class SaveExecutor:
    """One thread that writes checkpoints.

    Reliable saves are all written, and one that finds `capacity` others waiting waits itself. Of the others only the newest is
    kept: a save that has not begun gives way to the one that comes after it.

    Args:
        capacity: Reliable saves that may wait.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None], *, reliable: bool) -> None:
        """Enqueue a save.

        Args:
            run: Writes it; what it raises is kept for `take_error`.
            reliable: Whether it must be written, whatever comes after it.
        """
        with self._changed:
            while len(self._waiting) >= self._capacity and all(job.reliable for job in self._waiting):
                self._changed.wait()
            self._waiting = deque(job for job in self._waiting if job.reliable)
            self._waiting.append(_Job(run, reliable))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="danling-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = True
                self._changed.notify_all()
            try:
                job.run()
            except BaseException as error:  # torch's CheckpointException is no Exception, and none may pass unseen
                self._error = self._error or error
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, once."""
        error, self._error = self._error, None
        return error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is written; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait, and end the thread; return whether everything was written in time."""
        done = self.wait(timeout)
        with self._changed:
            self._ending = True
            if not done:
                self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join()
        return done
