"""What a thread is doing, seen from beside it: which part of a training it is in, and whether it waits for the other ranks.

Nothing is added to the thread that is looked at. Its Python stack says which part of the training is under way, and where in it; the
operating system says whether it runs or sleeps, since a thread that waits in a collective sleeps, and one that computes there does not.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch

from danling.reporting.rank_times import ACTIVITIES

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGES = str(Path(_TORCH).parent) + os.sep
_DANLING = str(Path(__file__).parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep

_COMPUTES, _WAITS, _PASSED_OVER, _BACKWARD = range(4)

_COMMUNICATION = (
    f"{_TORCH}distributed{os.sep}",
    # Broadcasts buffers before a forward; the forward itself has frames of its own.
    f"{_TORCH}{os.path.join('nn', 'parallel', 'distributed.py')}",
    f"{_DANLING}distributed{os.sep}",
    f"{_DANLING}torchft{os.sep}",
    f"{_PACKAGES}torchft{os.sep}",
    f"{_PACKAGES}deepspeed{os.sep}comm{os.sep}",
)
_ENGINE = f"{_TORCH}{os.path.join('autograd', 'graph.py')}"
"""A backward, at whose end DistributedDataParallel waits for its reductions in native code."""

_NEUTRAL = tuple(f"{_TORCH}{name}" for name in ("_ops.py", "_tensor.py", f"utils{os.sep}", f"autograd{os.sep}"))
"""What stands between a collective and who called it."""

_CODE = tuple[str, str]
"""File and name of a function."""


class ThreadSleep:
    """Tells whether a thread of this process sleeps, from the kernel's table; where there is none, it is not known."""

    def __init__(self, native_id: int) -> None:
        try:
            self._file: int | None = os.open(f"/proc/self/task/{native_id}/stat", os.O_RDONLY)
        except OSError:
            self._file = None

    def __call__(self) -> bool | None:
        """Return whether it sleeps, `None` when that is not known."""
        if self._file is None:
            return None
        try:
            text = os.pread(self._file, 512, 0)
        except OSError:
            return None
        # The name of the thread stands in parentheses, and may have some.
        return text[text.rindex(b")") + 2 : text.rindex(b")") + 3] == b"S"

    def close(self) -> None:
        """Close the table."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class StackReader:
    """Reads from a stack what its thread is doing.

    Args:
        parts: Activities by the functions that they happen in, of which the innermost one counts; what is no function is passed over.
        on_accelerator: Whether the backward runs in threads of its own, for which the calling one sleeps.
    """

    def __init__(self, parts: Mapping[Callable[..., object], str], *, on_accelerator: bool = False) -> None:
        self._parts: dict[_CODE, str] = {}
        for function, part in parts.items():
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, CodeType):
                self._parts[code.co_filename, code.co_name] = part
        self._kinds: dict[str, int] = {}
        self._backward_waits = not on_accelerator

    def activity(self, frame: FrameType | None, sleeps: Callable[[], bool | None]) -> str:
        """Return what a thread is doing, one of `ACTIVITIES`.

        Args:
            frame: Its innermost frame.
            sleeps: Tells whether it sleeps; asked only where that decides.
        """
        part, waits = self.part_of(frame), self.in_communication(frame)
        if part == "data" or not waits:
            return part
        asleep = sleeps()
        if asleep is None:
            # Without the kernel's word a backward is taken for computing.
            asleep = waits == _WAITS
        return "waiting" if asleep else part

    def part_of(self, frame: FrameType | None) -> str:
        """Return the part of the training that a stack is in.

        Args:
            frame: Its innermost frame.
        """
        parts = self._parts
        while frame is not None:
            code = frame.f_code
            part = parts.get((code.co_filename, code.co_name))
            if part is not None:
                return part
            frame = frame.f_back
        return "computing"

    def in_communication(self, frame: FrameType | None) -> int:
        """Return whether a stack ends within communication: 0 where it does not, and another number in a backward, which may or may not.

        Args:
            frame: Its innermost frame.
        """
        kinds = self._kinds
        while frame is not None:
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = kind_of(file)
            if kind == _WAITS:
                return _WAITS
            if kind == _BACKWARD and frame.f_code.co_name == "_engine_run_backward":
                return _BACKWARD if self._backward_waits else 0
            if kind == _COMPUTES:
                return 0
            frame = frame.f_back
        return 0


def kind_of(file: str) -> int:
    """Return what the functions of a source file do, for a thread whose stack ends in them."""
    if file.startswith(_COMMUNICATION):
        return _WAITS
    if file == _ENGINE:
        return _BACKWARD
    if file.startswith(_NEUTRAL):
        return _PASSED_OVER
    # Packages lie below the standard library's directory.
    is_standard = file.startswith(_STANDARD) and not file.startswith(_PACKAGES) and "-packages" not in file
    return _PASSED_OVER if is_standard or file.startswith("<") else _COMPUTES


class ActivitySampler:
    """Adds up what a thread is doing, from a look at it now and then.

    Args:
        reader: Reads its stack.
        thread: Number of the thread, as `threading.get_ident`.
        native_id: Number of the thread, as `threading.get_native_id`.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        reader: StackReader,
        *,
        thread: int,
        native_id: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.thread = thread
        self._reader = reader
        self._sleeps = ThreadSleep(native_id)
        self._clock = clock
        self._last = clock()
        self._seconds = [0.0] * len(ACTIVITIES)
        self._looks = 0

    def look(self) -> str:
        """Look once: what is seen counts for the time since the last look. Return it."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        # The frame is not kept: it would keep alive what its function holds.
        seen = self._reader.activity(sys._current_frames().get(self.thread), self._sleeps)
        self._seconds[ACTIVITIES.index(seen)] += seconds
        self._looks += 1
        return seen

    def take(self) -> tuple[Sequence[float], int]:
        """Return the seconds by activity since the last call, and the number of looks. May be called from another thread than `look`."""
        taken, self._seconds = self._seconds, [0.0] * len(ACTIVITIES)
        looks, self._looks = self._looks, 0
        return taken, looks

    def close(self) -> None:
        """Let go of the kernel's table."""
        self._sleeps.close()
