"""SIGTERM to a command that has started processes: they are ended with it, and its scratch directory is removed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Sigterm:
    """Lets SIGTERM end a command as an exception does: its processes and its directory go with it."""

    def __init__(self) -> None:
        self._held = self._came = False

    def __call__(self, number: int, frame: object) -> None:
        self._came = True
        self._leave()

    def _leave(self) -> None:
        if self._came and not self._held:
            # A second one must not break off what the first one has begun.
            self._held = True
            sys.exit(128 + signal.SIGTERM)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put it off: a process that is being started is known to nobody yet."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._leave()

    def begin(self) -> None:
        """Forget an earlier one."""
        self._held = self._came = False


SIGTERM = _Sigterm()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block by `SystemExit`; another thread than the main one is left as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    SIGTERM.begin()
    before = signal.signal(signal.SIGTERM, SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
