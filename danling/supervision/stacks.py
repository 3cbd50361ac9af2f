"""Stacks as people read them: where a thread is, which collective it waits in, and what excuses that it takes long."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_DANLING = str(Path(__file__).parents[1]) + os.sep
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
_CALLED_BY_NAME = f"{_COLLECTIVES}distributed_c10d.py"
"""Where the collectives are that people know by their names."""
_DOMAINS = f"{_DANLING}distributed{os.sep}"
_OWN_CALLS = f"{_DANLING}audit{os.sep}layout_record.py"
"""Stands between a program and all that it calls of torch, in a check of layouts."""
_STANDARD = str(Path(os.__file__).parent) + os.sep
_MOST_FRAMES = 40

BACKWARD = "the reduction of gradients at the end of a backward"

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
"""What may take any time, by what the path of a source file has in it."""


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def excuse_of(frame: FrameType | None) -> str:
    """Return why what a thread does may take any time; an empty text where nothing says so."""
    files = {found.f_code.co_filename for found in frames_of(frame)}
    return next((name for name, parts in _EXCUSES.items() if any(part in file for part in parts for file in files)), "")


def collective_of(frame: FrameType | None) -> tuple[str, str]:
    """Return the collective that a thread waits in and where it was called; two empty texts where it is in none."""
    name = ""
    for found in frames_of(frame):
        code = found.f_code
        if code.co_filename == _CALLED_BY_NAME or (not name and code.co_filename.startswith(_COLLECTIVES)):
            name = name if code.co_name == "wrapper" else code.co_name
        elif code.co_filename.startswith(_COLLECTIVES):
            continue
        elif code.co_name == "_engine_run_backward":
            name = name or BACKWARD
        elif code.co_filename.startswith(_DOMAINS):
            name = name or code.co_name
        elif name and not code.co_filename.startswith(_TORCH) and code.co_filename != _OWN_CALLS:
            return name, spot(found)
        elif not name and not _is_between(code.co_filename):
            return "", ""
    return name, ""


def _is_between(file: str) -> bool:
    return file.startswith((_TORCH, _STANDARD)) and "-packages" not in file.removeprefix(_TORCH)


def place_of(frame: FrameType | None) -> str:
    """Return where a thread is: in the innermost function that is of no library, else in the innermost one."""
    found = list(frames_of(frame))
    own = [one for one in found if not one.f_code.co_filename.startswith((_STANDARD, _TORCH, _DANLING, "<"))]
    own = [one for one in own if "-packages" not in one.f_code.co_filename]
    if not own:
        return spot(found[0]) if found else "nowhere"
    inner = "" if own[0] is found[0] else f", in {found[0].f_code.co_name}"
    if any(one.f_code.co_name == "_try_get_data" for one in found):
        inner = ", waiting for a worker of its data loader"
    return f"{spot(own[0])}{inner}"


def spot(frame: FrameType) -> str:
    """Return file, line and function of a frame, and what stands there."""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f" ({text})" if text else "")


def stack_text(frame: FrameType | None) -> str:
    """Return a stack as Python prints it, the innermost frame last; of a long one what is nearest."""
    return "".join(traceback.format_stack(frame, _MOST_FRAMES)) if frame is not None else ""


def all_stacks() -> str:
    """Return the stacks of all threads of this process but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            found.append(f"Thread {names.get(thread, thread)} (most recent call last):\n{stack_text(frame)}")
    return "\n".join(found)
