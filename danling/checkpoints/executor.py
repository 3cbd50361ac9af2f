"""The thread that writes checkpoints in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SaveExecutor:
    """One thread that writes checkpoints, one at a time, in order; nothing that goes wrong is lost.

    One save waits at most. A reliable one is always written: the next `submit` waits until it has begun. Any other gives way to the next
    one.
    """

    def __init__(self) -> None:
        self._next: tuple[Callable[[], None], Callable[[], None], bool] | None = None
        """Of the save that waits: what writes it, what frees its copy, and whether it is reliable."""
        self._changed = threading.Condition()
        self._running = False
        self._ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save waits or is being written."""
        with self._changed:
            return self._running or self._next is not None

    def wait_for_room(self) -> None:
        """Wait until a save can be submitted: before its copy is made, so that copies in memory stay few."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or not self._next[2])

    def submit(
        self, run: Callable[[], None], *, reliable: bool, release: Callable[[], None]
    ) -> None:
        """Enqueue a save; `release` is called when it is written, has failed, or a newer save has taken its place."""
        if self._ending:
            raise RuntimeError("A checkpoint manager cannot save after close(). Save before it.")
        self.wait_for_room()
        with self._changed:
            # Only a save that may give way can be here: there is room.
            dropped, self._next = self._next, (run, release, reliable)
            if self._thread is None:
                # A daemon: a save that hangs must not keep a process alive that close() has given up waiting for.
                self._thread = threading.Thread(
                    target=self._work, name="danling-checkpoint", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        if dropped is not None:
            dropped[1]()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ending)
                if self._next is None:
                    return
                run, release, _ = self._next
                self._next, self._running = None, True
                self._changed.notify_all()
            error: BaseException | None = None
            try:
                run()
            # torch's CheckpointException is no Exception, and none may pass unseen.
            except BaseException as raised:
                error = raised
            release()
            # Not kept while the next one is awaited: they refer to the copy of a whole state.
            del run, release
            with self._changed:
                # The first one: those that follow are often its consequences.
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
            return self._changed.wait_for(lambda: self._next is None and not self._running, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait, and end the thread; return whether everything was written in time. What has not begun by then is given up."""
        done = self.wait(timeout)
        with self._changed:
            self._ending, self._next = True, None
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join()
        return done
