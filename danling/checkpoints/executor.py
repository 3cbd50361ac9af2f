"""Background writing: one save at a time, in order, and nothing that goes wrong is lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A save that waits.

    Attributes:
        run: Writes it.
        discard: Called instead of `run` when a newer save takes its place.
        reliable: Whether it must be written, whatever comes after it.
    """

    run: Callable[[], None]
    discard: Callable[[], None]
    reliable: bool


class SaveExecutor:
    """One thread that writes checkpoints.

    Reliable saves are all written; `submit` waits when `capacity` of them wait already. Of the others only the newest is kept: one
    that has not begun gives way to whatever comes after it.
    """

    def __init__(self, capacity: int = 1) -> None:
        self._capacity = capacity
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save waits or is being written."""
        with self._changed:
            return self._running or bool(self._waiting)

    def wait_for_room(self) -> None:
        """Wait until a save can be submitted: before its copy is made, so that copies in memory stay as few as saves in the queue."""
        with self._changed:
            self._changed.wait_for(lambda: sum(job.reliable for job in self._waiting) < self._capacity)

    def submit(self, run: Callable[[], None], *, reliable: bool, discard: Callable[[], None] = lambda: None) -> None:
        """Enqueue a save."""
        if self._ending:
            raise RuntimeError("Expected a save before the checkpoint manager is closed. Received: one after it.")
        self.wait_for_room()
        with self._changed:
            dropped = [job for job in self._waiting if not job.reliable]
            self._waiting = deque(job for job in self._waiting if job.reliable)
            self._waiting.append(Job(run, discard, reliable))
            if self._thread is None:
                # A daemon: a save that hangs must not keep a process alive that close() has given up waiting for.
                self._thread = threading.Thread(target=self._work, name="danling-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        for job in dropped:
            job.discard()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._ending)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = True
                self._changed.notify_all()
            error: BaseException | None = None
            try:
                job.run()
            except BaseException as raised:  # torch's CheckpointException is no Exception, and none may pass unseen
                error = raised
            # Not held while the next job is awaited: its closure holds the copy of a whole state.
            del job
            with self._changed:
                self._error = self._error or error
                self._running = False
                self._changed.notify_all()

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, once."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is written; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait, and end the thread; return whether everything was written in time. What has not begun by then is given up."""
        done = self.wait(timeout)
        with self._changed:
            self._ending = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join()
        return done
