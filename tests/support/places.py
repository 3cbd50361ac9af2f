"""How many ranks run at a time: the workers of pytest-xdist share eight places, and a test takes as many as it starts ranks.

    with places(world_size):                    # waits until so many are free
        ...                                     # start the ranks, and wait for them

Most of a test of ranks is waiting, so more workers than cores are quicker; without a common limit, as many tests of four ranks as
there are workers would meet. `support.processes` and `support.job` take the places; a test has nothing to do with them.

A place is a lock on a file (`flock`), which the kernel gives back when a worker is killed. Who waits holds none: all that are asked
for are collected behind one gate, and a test that has some already goes on without waiting for more. So nobody waits for anybody who waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PLACES = 8
"""How many ranks of all workers together run at a time."""
SECONDS_BETWEEN_LOOKS = 0.005

_asking, _counting = threading.Lock(), threading.Lock()
_directory: Path | None = None
_held = 0


def share_places(directory: Path | None) -> Path | None:
    """Share the places with every process that names the same directory; without one this process has no limit."""
    global _directory
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    before, _directory = _directory, directory
    return before


class Places:
    """What is held until `give_back`, which any thread may call, and more than once."""

    def __init__(self, number: int) -> None:
        self._number = number
        # One at a time: a second thread of a test does not wait either, since the first one has some by then.
        with _asking:
            self._locks = _locked(_directory, min(number, PLACES), wait=not _held) if _directory else []
            _count(number)

    def give_back(self) -> None:
        """Give all of them back."""
        with _counting:
            locks, self._locks = self._locks, []
            number, self._number = self._number, 0
        _count(-number)
        for lock in locks:
            # A process that was forked meanwhile has the file too: closing it here would not be enough.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _count(number: int) -> None:
    global _held
    with _counting:
        _held += number


@contextlib.contextmanager
def places(number: int) -> Iterator[None]:
    """Hold places for so many ranks."""
    held = Places(number)
    try:
        yield
    finally:
        held.give_back()


def _locked(directory: Path, number: int, *, wait: bool) -> list[int]:
    if not wait:
        return _free(directory, number)
    if not number:
        return []
    with _clock_of_the_test_stopped(), open(directory / "gate", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        locks = _free(directory, number)
        try:
            while len(locks) < number:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                locks += _free(directory, number - len(locks))
        except BaseException:
            for lock in locks:
                os.close(lock)
            raise
        return locks


def _free(directory: Path, number: int) -> list[int]:
    """Lock up to `number` places that nobody has."""
    locks: list[int] = []
    for place in range(PLACES):
        if len(locks) == number:
            break
        file = os.open(directory / str(place), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            locks.append(file)
    return locks


@contextlib.contextmanager
def _clock_of_the_test_stopped() -> Iterator[None]:
    """Stop the timer by which pytest-timeout ends a test: other tests have limits of their own, so that this wait ends too."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)
