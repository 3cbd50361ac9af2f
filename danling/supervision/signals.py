"""Signals are noted by a handler and heeded by the loop at its next boundary."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("danling")

# Windows has no SIGUSR1.
SIGNAL_REQUESTS = {
    getattr(signal, name): request
    for name, request in (("SIGTERM", "terminate"), ("SIGINT", "interrupt"), ("SIGUSR1", "user_signal"))
    if hasattr(signal, name)
}
"""What a signal asks for."""

EXIT_CODES = {"terminate": 143, "interrupt": 130, "user_signal": 143}
"""Exit codes of a run that a signal stopped: 128 and the number of the signal, as shells count. SIGUSR1 is how
schedulers announce that a job is going to be ended, so it counts as SIGTERM."""


class SignalWatcher:
    """Notes signals and does nothing else: a handler interrupts anything, also a collective or a save half-way.

    The first signal stands, but SIGTERM and SIGINT replace a SIGUSR1. A second SIGINT raises `KeyboardInterrupt` at
    once, for users who do not want to wait. A signal that was ignored before (`nohup`, a background job of a shell
    script) stays ignored.

    Python runs handlers between bytecodes of the main thread: a signal that arrives during a blocking collective is
    noted when it returns.

    Args:
        signals: The signals to watch.
    """

    def __init__(self, signals: Iterable[signal.Signals] = tuple(SIGNAL_REQUESTS)) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        """The signal to heed, `None` so far. A plain attribute: reading it at every step costs nothing."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def request(self) -> str | None:
        """What the signal that came asks for: `"terminate"`, `"interrupt"` or `"user_signal"`; `None` without one."""
        return None if self.received is None else SIGNAL_REQUESTS.get(self.received, "terminate")

    def install(self) -> bool:
        """Take over the handlers. A second call does nothing.

        Returns:
            Whether signals are watched: Python allows it in the main thread only; elsewhere a warning says so.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals are not watched: the runner does not run in the main thread.")
            return False
        for number in self.signals:
            if number not in self._previous and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return True

    def uninstall(self) -> None:
        """Put the previous handlers back; what was received stays readable. A second call does nothing."""
        while self._previous:
            number, handler = self._previous.popitem()
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def clear(self) -> None:
        """Forget what was received."""
        self.received = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received is signal.SIGINT and self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received not in (signal.SIGTERM, signal.SIGINT):
            self.received = received

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()
