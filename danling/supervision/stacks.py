"""What a thread does, as its stack and the kernel say: whether it waits for other ranks, in which collective, and where it is."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_BACKWARD = "the reduction of gradients at the end of a backward"
# A stack is printed for each rank: the innermost frames tell, and those of launchers below do not.
_MOST_FRAMES = 40

# Frames are told apart by where their source files are, which needs no list of torch's functions.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_DANLING = str(Path(__file__).parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
_CALLED_BY_NAME = f"{_COLLECTIVES}distributed_c10d.py"
"""Where the collectives are that people know by their names."""
_COMMUNICATION = (
    _COLLECTIVES,
    # Broadcasts buffers before a forward; the forward itself has other frames.
    f"{_TORCH}{os.path.join('nn', 'parallel', 'distributed.py')}",
    f"{_DANLING}distributed{os.sep}",
    f"{_DANLING}torchft{os.sep}",
    *(
        f"{Path(_TORCH).parent}{os.sep}{name}{os.sep}"
        for name in ("torchft", f"deepspeed{os.sep}comm")
    ),
)
_ENGINE = f"{_TORCH}{os.path.join('autograd', 'graph.py')}"
"""A backward, at whose end DistributedDataParallel waits for its reductions in native code."""
_NEUTRAL = (
    "<",
    *(
        f"{_TORCH}{name}"
        for name in ("_ops.py", "_tensor.py", f"utils{os.sep}", f"autograd{os.sep}")
    ),
)
"""Files between a collective and its caller."""
OF_MODULES = f"{_COLLECTIVES}fsdp{os.sep}"
"""Gathers the weights of modules and reduces their gradients."""

_EXCUSES = {
    "in a debugger": (f"{os.sep}pdb.py", f"{os.sep}bdb.py", "debugpy", "pydevd"),
    "compiling": (
        os.path.join("_dynamo", "convert_frame.py"),
        os.path.join("_inductor", "compile_fx.py"),
        os.path.join("_inductor", "async_compile.py"),
        os.path.join("triton", "compiler") + os.sep,
    ),
    "waiting for a stream": (f"{_DANLING}stream{os.sep}",),
    "waiting for other replica groups": (f"{_DANLING}torchft{os.sep}", f"{os.sep}torchft{os.sep}"),
}
"""Activities that may take any time, with parts of the paths of their source files."""


class WatchedThread:
    """The thread that makes this, seen from another one: its stack, whether it sleeps in communication, and its time on a processor.

    Args:
        on_accelerator: Whether a backward runs in other threads while the calling one sleeps.
    """

    def __init__(self, *, on_accelerator: bool) -> None:
        self._ident = threading.get_ident()
        self._file: int | None = None
        self._cpu_clock: int | None = None
        try:
            self._cpu_clock = time.pthread_getcpuclockid(self._ident)
            # Not `Thread.native_id`: in a forked process that is the number of the parent's thread.
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/stat", os.O_RDONLY)
        except (AttributeError, OSError):
            pass
        # The frame of a backward is the same while it computes and while it waits: only the kernel
        # tells. On an accelerator the calling thread sleeps in both, so a backward counts as computing.
        self._backward_waits = self._file is not None and not on_accelerator

    def frame(self) -> FrameType | None:
        """Return its innermost frame; to be dropped at once, since it keeps the variables of its function alive."""
        return sys._current_frames().get(self._ident)

    def instruction(self) -> tuple[int, int] | None:
        """Return which instruction of which code it executes: the same one twice where it has not moved."""
        frame = self.frame()
        return None if frame is None else (id(frame.f_code), frame.f_lasti)

    def waits(self, frame: FrameType | None) -> bool:
        """Return whether it sleeps within communication, as its innermost frame and the kernel say."""
        # The innermost frame that says something decides: a hook of the user's that a collective of
        # the library calls, say, computes.
        kinds = (
            _kind_of(each.f_code.co_filename, each.f_code.co_name) for each in frames_of(frame)
        )
        kind = next(filter(None, kinds), "computes")
        if kind == "computes" or (kind == "backward" and not self._backward_waits):
            return False
        return self._sleeps(unknown=kind == "communicates")

    def _sleeps(self, *, unknown: bool) -> bool:
        """Return whether the kernel says that the thread sleeps; `unknown` where it says nothing."""
        if self._file is None:
            return unknown
        try:
            text = os.pread(self._file, 512, 0)
        except OSError:
            return unknown
        # The state comes behind the name of the thread, which is in parentheses and may have some.
        end = text.rindex(b")")
        return text[end + 2 : end + 3] == b"S"

    def cpu_seconds(self) -> float:
        """Return the time that it had on a processor; 0 where that is not known."""
        try:
            return time.clock_gettime(self._cpu_clock) if self._cpu_clock is not None else 0.0
        except OSError:
            return 0.0

    def close(self) -> None:
        """Close the kernel's table."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# Cached, since a watch looks twenty times a second, mostly at the same frames.
@functools.cache
def _kind_of(file: str, function: str) -> str:
    """Return what a thread does whose stack ends in a function; an empty text where the frames around it say so."""
    if file.startswith(_COMMUNICATION):
        return "communicates"
    if file == _ENGINE and function == "_engine_run_backward":
        return "backward"
    # Packages that are installed are below the standard library, and compute.
    is_standard = file.startswith(_STANDARD) and "-packages" not in file
    is_neutral = is_standard or file.startswith(_NEUTRAL) or file == _ENGINE
    return "" if is_neutral else "computes"


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def excuse_of(frame: FrameType | None) -> str:
    """Return why what a thread does may take any time; an empty text where nothing says so."""
    files = {found.f_code.co_filename for found in frames_of(frame)}
    return next(
        (
            name
            for name, parts in _EXCUSES.items()
            if any(part in file for part in parts for file in files)
        ),
        "",
    )


def collective_of(frame: FrameType | None) -> tuple[str, str]:
    """Return the collective that a thread waits in and where it was called; two empty texts where it is in none."""
    name = ""
    for found in frames_of(frame):
        file, function = found.f_code.co_filename, found.f_code.co_name
        if file == _CALLED_BY_NAME or (not name and file.startswith(_COLLECTIVES)):
            # Each collective of torch is within a decorator, whose frame is called `wrapper`.
            name = name if function == "wrapper" else function
        elif function == "_engine_run_backward":
            name = name or _BACKWARD
        elif file.startswith(f"{_DANLING}distributed{os.sep}"):
            name = name or function
        elif name and not file.startswith(_TORCH):
            return name, spot(found)
    return name, ""


def location_of(frame: FrameType | None) -> str:
    """Return where a thread is: in the innermost function that is of no library, else in the innermost one."""
    found = list(frames_of(frame))
    # A file that is called `<...>` has no source, such as what `exec` runs.
    libraries = (_STANDARD, _TORCH, _DANLING, "<")
    files = ((each, each.f_code.co_filename) for each in found)
    own = next(
        (
            each
            for each, file in files
            if not file.startswith(libraries) and "-packages" not in file
        ),
        None,
    )
    if own is None:
        return spot(found[0]) if found else "nowhere"
    # `DataLoader` polls its workers in this function, from one of several places.
    if any(each.f_code.co_name == "_try_get_data" for each in found):
        return f"{spot(own)}, waiting for a worker of its data loader"
    return spot(own) + ("" if own is found[0] else f", in {found[0].f_code.co_name}")


def spot(frame: FrameType) -> str:
    """Return file, line and function of a frame, and its source line."""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f" ({text})" if text else "")


def stack_text(frame: FrameType | None) -> str:
    """Return a stack as Python prints it, the innermost frame last; of a long one the innermost frames."""
    return "".join(traceback.format_stack(frame, _MOST_FRAMES)) if frame is not None else ""
