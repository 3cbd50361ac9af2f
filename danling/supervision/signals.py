"""Signals are noted by a handler and heeded by the loop at its next boundary."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger("danling")

# Windows has no SIGUSR1.
SIGNAL_REQUESTS = {
    getattr(signal, name): request
    for name, request in (
        ("SIGTERM", "terminate"),
        ("SIGINT", "interrupt"),
        ("SIGUSR1", "user_signal"),
    )
    if hasattr(signal, name)
}
"""What a signal asks for."""

EXIT_CODES = {"terminate": 143, "interrupt": 130, "user_signal": 143}
"""Exit codes of a run that a signal stopped: 128 and the number of the signal, as shells count. SIGUSR1 is how
schedulers announce that a job is going to be ended, so it counts as SIGTERM."""

_GRACE_SECONDS = 3.0


class SignalWatcher:
    """Notes signals and does nothing else: a handler interrupts anything, also a collective or a save half-way.

    The first signal counts, but SIGTERM and SIGINT replace a SIGUSR1. A second SIGINT raises `KeyboardInterrupt` at
    once, for users who do not want to wait, whatever came before the two; one after a SIGTERM does not, since a launcher
    may send both. A signal that was ignored before (`nohup`, a background job of a shell
    script) stays ignored.

    Python runs handlers between bytecodes of the main thread: a signal that arrives during a blocking collective is
    noted when it returns. Should that never happen, the second SIGINT ends the process all the same: Python's wake-up
    pipe tells a thread of it, which gives the main thread three seconds to raise and then ends the process with 130.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal to heed, `None` so far. A plain attribute: reading it at every step costs nothing."""
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: int | None = None
        """The end of the wake-up pipe that is written."""

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
        for number in SIGNAL_REQUESTS:
            if number not in self._previous and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        if signal.SIGINT in self._previous and self._pipe is None:
            read, write = os.pipe()
            os.set_blocking(write, False)
            before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            if before != -1:
                # The program, such as an event loop, listens itself.
                signal.set_wakeup_fd(before)
                os.close(read)
                os.close(write)
            else:
                self._pipe = write
                _pipes.add(write)
                threading.Thread(
                    target=_end_at_second_interrupt,
                    args=(read,),
                    name="danling-signals",
                    daemon=True,
                ).start()
        return True

    def uninstall(self) -> None:
        """Put the previous handlers back; what was received stays readable. A second call does nothing."""
        if self._pipe is not None:
            write, self._pipe = self._pipe, None
            signal.set_wakeup_fd(-1)
            _pipes.discard(write)
            # The thread closes its own end when it has seen the last of this one.
            os.close(write)
        while self._previous:
            number, handler = self._previous.popitem()
            # None means a handler that was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received is signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        # SIGUSR1 only announces the end.
        if self.received not in (signal.SIGTERM, signal.SIGINT):
            self.received = received

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


_pipes: set[int] = set()
_forking = threading.local()


def _hold_interrupts() -> None:
    # A child that gets one before it has left the pipe would count it there.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _pipes else None


def _release_interrupts() -> None:
    mask = getattr(_forking, "mask", None)
    _forking.mask = None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave_pipe() -> None:
    # A worker of a loader gets the Ctrl-C of its terminal as well, and would count it into the pipe that it shares.
    if _pipes:
        signal.set_wakeup_fd(-1)
    _release_interrupts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_interrupts, after_in_parent=_release_interrupts, after_in_child=_leave_pipe
    )


def _end_at_second_interrupt(read: int) -> None:
    interrupts = 0
    try:
        while numbers := os.read(read, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts >= 2:
                # Where the main thread can, it has ended with KeyboardInterrupt, or closed the pipe, by then.
                ready, _, _ = select.select([read], [], [], _GRACE_SECONDS)
                if not ready or os.read(read, 64):
                    os._exit(EXIT_CODES["interrupt"])
                return
    finally:
        os.close(read)
