"""A thread beside the training of each rank, which sees what the rank spends its time with."""

from __future__ import annotations

import contextvars
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from .activity import ActivitySampler

logger = logging.getLogger("danling")

SECONDS_BETWEEN_LOOKS = 0.05
"""A look takes some ten microseconds of the interpreter."""

_SECONDS_BETWEEN_CHECKS = 1.0


class Notes(Protocol):
    """Where ranks leave notes for each other; see `danling.distributed.Board`."""

    def write(self, key: str, text: str) -> None:
        """Leave a note."""

    def read(self, key: str) -> str | None:
        """Return a note, `None` where there is none."""


class Check(Protocol):
    """What looks after something once a second."""

    def check(self) -> None:
        """Look after it."""

    def close(self) -> None:
        """Let go of what it has opened."""


class RankWatch:
    """Looks at a thread of this rank now and then, while it trains; it is begun and stopped by that thread.

    Args:
        sampler: Looks at the thread; closed at the end.
        board: Where the ranks tell each other on which machine they run.
        rank: Number of this rank.
        size: Number of ranks.
        gathers: Whether this rank needs to know the machines of all.
        checks: What is done once a second.
        seconds: From one look to the next, on average.
    """

    def __init__(
        self,
        sampler: ActivitySampler,
        *,
        board: Notes,
        rank: int,
        size: int,
        gathers: bool,
        checks: Sequence[Check] = (),
        seconds: float = SECONDS_BETWEEN_LOOKS,
    ) -> None:
        self.sampler = sampler
        self._board = board
        self._rank = rank
        self._hosts: list[str | None] = [None] * size
        self._gathers = gathers
        self._checks = checks
        self._seconds = seconds
        # Looks at even intervals could fall on the same place of every update. The program's own numbers are left alone.
        self._dice = random.Random(rank)
        self._stopping = threading.Event()
        # In the context of the training, so that what it says is in the log of that run alone.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="danling-rank-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A second call does nothing."""
        if not self._stopping.is_set():
            self._stopping.set()
            # A store that does not answer must not hold up the end.
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self.sampler.close()
                for check in self._checks:
                    check.close()

    def hosts(self) -> Sequence[str | None]:
        """Return the machine of each rank, `None` where it is not known yet."""
        return self._hosts

    def _run(self) -> None:
        try:
            self._board.write(f"host/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
            self._watch()
        except Exception:
            # It only looks on: nothing that goes wrong here may end the training.
            logger.exception("What watches over rank %d has failed; training goes on without it.", self._rank)

    def _watch(self) -> None:
        due = time.monotonic()
        while not self._stopping.wait(self._seconds * self._dice.uniform(0.5, 1.5)):
            self.sampler.look()
            if time.monotonic() >= due:
                self._gather()
                for check in self._checks:
                    check.check()
                due = time.monotonic() + _SECONDS_BETWEEN_CHECKS

    def _gather(self) -> None:
        if self._gathers and None in self._hosts:
            self._hosts = [found or self._host_of(rank) for rank, found in enumerate(self._hosts)]

    def _host_of(self, rank: int) -> str | None:
        told = self._board.read(f"host/{rank}")
        return told.rpartition(" ")[0] if told else None
