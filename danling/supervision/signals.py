"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNAL_REQUESTS = {signal.SIGTERM: "terminate", signal.SIGINT: "interrupt", signal.SIGUSR1: "user_signal"}
"""What a signal asks for."""

EXIT_CODES = {"terminate": 143, "interrupt": 130, "user_signal": 143}
"""Exit code of a run that was stopped by a signal, after its full state was saved: 128 and the number of the signal."""


class SignalWatcher:
    """Records that SIGTERM, SIGINT or SIGUSR1 has come; what follows is decided at the next update boundary.

    A second SIGINT raises `KeyboardInterrupt` at once. In another thread than the main one, where Python allows no handlers, it
    watches nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def request(self) -> str | None:
        """What the signal that came asks for, `None` when none has come."""
        return None if self.received is None else SIGNAL_REQUESTS[signal.Signals(self.received)]

    def install(self) -> None:
        """Put the handlers in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNAL_REQUESTS:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def uninstall(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
