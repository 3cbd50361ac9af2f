"""A thread next to the training of each rank: what the rank spends its time with, and whether it waits for the others.

The events of the training say which part of it is under way. The operating system says whether the training thread runs or sleeps: one that
waits in a collective sleeps, and one that computes there does not.
"""

from __future__ import annotations

import contextvars
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from danling.distributed import Board, default_store
from danling.reporting.rank_times import ACTIVITIES, RankTimes
from danling.utils.observers import Observer

from .hangs import DANLING, STANDARD, TORCH, HangWatch

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_SECONDS_BETWEEN_LOOKS = 0.05
"""A look takes some ten microseconds of the interpreter."""

_SECONDS_BETWEEN_CHECKS = 1.0

_PACKAGES = str(Path(TORCH).parent) + os.sep

_COMPUTES, _WAITS, _SKIPPED, _BACKWARD = range(4)

_COMMUNICATION = (
    f"{TORCH}distributed{os.sep}",
    # Broadcasts buffers before a forward; the forward itself has other frames.
    f"{TORCH}{os.path.join('nn', 'parallel', 'distributed.py')}",
    f"{DANLING}distributed{os.sep}",
    f"{DANLING}torchft{os.sep}",
    f"{_PACKAGES}torchft{os.sep}",
    f"{_PACKAGES}deepspeed{os.sep}comm{os.sep}",
)
_ENGINE = f"{TORCH}{os.path.join('autograd', 'graph.py')}"
"""A backward, at whose end DistributedDataParallel waits for its reductions in native code."""

_NEUTRAL = tuple(f"{TORCH}{name}" for name in ("_ops.py", "_tensor.py", f"utils{os.sep}", f"autograd{os.sep}"))
"""Files between a collective and its caller."""


class WatchedThread:
    """A thread of this process, seen from another one: its stack, and whether it sleeps in communication.

    Args:
        thread: The thread.
        on_accelerator: Whether a backward runs in other threads while the calling one sleeps.
    """

    def __init__(self, thread: threading.Thread, *, on_accelerator: bool = False) -> None:
        self.ident = thread.ident or 0
        self._backward_waits = not on_accelerator
        self._kinds: dict[str, int] = {}
        try:
            self._file: int | None = os.open(f"/proc/self/task/{thread.native_id}/stat", os.O_RDONLY)
        except OSError:
            self._file = None

    def frame(self) -> FrameType | None:
        """Return its innermost frame; to be dropped at once, since it keeps the variables of its function alive."""
        return sys._current_frames().get(self.ident)

    def sleeps(self) -> bool | None:
        """Return whether it sleeps, `None` where the kernel has no table that says so."""
        try:
            text = os.pread(self._file, 512, 0) if self._file is not None else b""
        except OSError:
            return None
        # The name of the thread is in parentheses, and may have some.
        return text[text.rindex(b")") + 2 : text.rindex(b")") + 3] == b"S" if text else None

    def waits(self, frame: FrameType | None) -> bool:
        """Return whether it sleeps within communication.

        Args:
            frame: Its innermost frame.
        """
        kind = self._communicates(frame)
        if kind == _COMPUTES:
            return False
        asleep = self.sleeps()
        # Without the kernel's word a backward is taken for computing.
        return kind == _WAITS if asleep is None else asleep

    def _communicates(self, frame: FrameType | None) -> int:
        """Return whether a stack ends within communication, or in a backward, which may wait or compute."""
        kinds = self._kinds
        while frame is not None:
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = _kind_of(file)
            if kind == _WAITS:
                return _WAITS
            if kind == _BACKWARD and frame.f_code.co_name == "_engine_run_backward":
                return _BACKWARD if self._backward_waits else _COMPUTES
            if kind == _COMPUTES:
                return _COMPUTES
            frame = frame.f_back
        return _COMPUTES

    def close(self) -> None:
        """Close the kernel's table."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _kind_of(file: str) -> int:
    """Return what the functions of a source file do, for a thread whose stack ends in them."""
    if file.startswith(_COMMUNICATION):
        return _WAITS
    if file == _ENGINE:
        return _BACKWARD
    if file.startswith(_NEUTRAL):
        return _SKIPPED
    # Packages are below the standard library's directory.
    is_standard = file.startswith(STANDARD) and not file.startswith(_PACKAGES) and "-packages" not in file
    return _SKIPPED if is_standard or file.startswith("<") else _COMPUTES


class RankWatch(Observer):
    """Watches the training thread of this rank: adds up what it does, and reports an update that hangs.

    Args:
        runner: The runner that trains.
        board: Where the ranks leave notes for each other; `None` is the store of the job.
        seconds: From one look to the next, on average; `None` is 0.05, and 1 where only hangs are looked for.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        runner: TorchRunner,
        *,
        board: Board | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        domain, self._share = runner.placement.optimizer, runner.config.comm.slow_rank_share
        self._rank = domain.rank
        stacks = runner.workspace.dir / "hangs"
        own = Board(default_store, f"{runner._session.training}", directory=lambda: stacks)
        self._board = own if board is None else board
        self._seconds = seconds or (_SECONDS_BETWEEN_LOOKS if self._share is not None else 1.0)
        self._hosts: list[str | None] = [None] * domain.size
        self._parts: tuple[str, ...] = ()
        on_accelerator = runner.device.type != "cpu"
        self.thread = WatchedThread(threading.current_thread(), on_accelerator=on_accelerator)
        self._hangs = HangWatch(runner, self.thread, self._board, part=self.part)
        self._clock = clock
        self._last = clock()
        self._sums = [0.0] * len(ACTIVITIES)
        self._looks = 0
        # Looks at even intervals could fall on the same place of every update. The program's own numbers are left alone.
        self._dice = random.Random(domain.rank)
        self._stopping = threading.Event()
        # In the context of the training, so that its lines are in the log of that run alone.
        context = contextvars.copy_context()
        self._watcher = threading.Thread(target=context.run, args=(self._run,), name="danling-rank-watch", daemon=True)

    @classmethod
    def of(cls, runner: TorchRunner) -> RankWatch | None:
        """Return the watch of a training that begins, for the thread that calls this; `None` without other ranks, or where it is off."""
        settings = runner.config.comm
        is_off = settings.slow_rank_share is None and settings.hang_warning_seconds is None
        return None if runner.placement.optimizer.size == 1 or is_off else cls(runner)

    # Events

    def training_started(self) -> None:
        if self._share is not None:
            self._runner._reporter.rank_times = RankTimes(self, self._share)
        self._watcher.start()

    def training_ended(self) -> None:
        self._runner._reporter.rank_times = None
        if not self._stopping.is_set():
            self._stopping.set()
            # A store that does not answer must not hold up the end.
            self._watcher.join(1.0)
            if not self._watcher.is_alive():
                self.thread.close()

    def batch_wait_started(self) -> None:
        self._parts = (*self._parts, "data")

    def batch_wait_ended(self) -> None:
        self._parts = self._parts[:-1]

    def evaluation_started(self, split: str) -> None:
        self._parts = (*self._parts, "evaluating")

    def evaluation_ended(self, split: str) -> None:
        self._parts = self._parts[:-1]

    def save_started(self) -> None:
        self._parts = (*self._parts, "checkpointing")

    def save_ended(self) -> None:
        self._parts = self._parts[:-1]

    def part(self) -> str:
        """Return the part of the training that is under way; before the first update and after the last one that is `checkpointing`."""
        parts = self._parts
        return parts[-1] if parts else "computing" if self._runner._session.running else "checkpointing"

    # What was seen

    def look(self) -> str:
        """Look once, count the time since the last look for the activity that it sees, and return that activity."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        part = self.part()
        seen = "waiting" if part != "data" and self.thread.waits(self.thread.frame()) else part
        self._sums[ACTIVITIES.index(seen)] += seconds
        self._looks += 1
        return seen

    def take(self) -> tuple[Sequence[float], int]:
        """Return the seconds by activity since the last call, and the number of looks. May be called from another thread than `look`."""
        taken, self._sums = self._sums, [0.0] * len(ACTIVITIES)
        looks, self._looks = self._looks, 0
        return taken, looks

    def hosts(self) -> Sequence[str | None]:
        """Return the machine of each rank, `None` where it is not known yet."""
        return self._hosts

    def _run(self) -> None:
        try:
            self._board.write(f"host/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
            due = time.monotonic()
            while not self._stopping.wait(self._seconds * self._dice.uniform(0.5, 1.5)):
                self.look()
                if time.monotonic() >= due:
                    if self._runner.is_main_process and None in self._hosts:
                        self._hosts = [found or self._host_of(rank) for rank, found in enumerate(self._hosts)]
                    self._hangs.check()
                    due = time.monotonic() + _SECONDS_BETWEEN_CHECKS
        except Exception:
            # Nothing that goes wrong here may end the training.
            logger.exception("What watches over rank %d has failed; training goes on without it.", self._rank)

    def _host_of(self, rank: int) -> str | None:
        note = self._board.read(f"host/{rank}")
        return note.rpartition(" ")[0] if note else None
