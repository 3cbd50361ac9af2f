"""Processes of the checks: calls in a fork, and the end of all that a process has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = float(os.environ.get("GPU_CHECK_PATIENCE") or 1)
"""What time limits are multiplied by."""


def forked(function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> Any:
    """Call a function in a fork of this process, which has imported torch and not used the GPU, and return what it returned.

    An error, a signal and a call that takes too long come back as `{"error": ...}`.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer, function, arguments)
    os.close(writer)
    os.set_blocking(reader, False)
    text, end = b"", time.monotonic() + timeout * PATIENCE
    ended, status = 0, 0
    while not ended:
        text += _available(reader)
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and time.monotonic() > end:
            kill_tree(child)
            os.waitpid(child, 0)
            os.close(reader)
            return {"error": f"no end within {timeout:g} s"}
        time.sleep(0 if ended else 0.02)
    text += _available(reader)
    os.close(reader)
    if os.WIFSIGNALED(status):
        return {"error": f"ended by {signal.Signals(os.WTERMSIG(status)).name}"}
    return json.loads(text) if text else {"error": "nothing came back"}


def _answer(writer: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        found = function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        found = failure(error)
    try:
        with os.fdopen(writer, "w") as stream:
            json.dump(found, stream)
    finally:
        os._exit(0)


def _available(reader: int) -> bytes:
    found = b""
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            return found
        if not part:
            return found
        found += part


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as a record of what was found."""
    return {
        "error": f"{type(error).__name__}: {error}"[:1500],
        "traceback": traceback.format_exc()[-2000:],
    }


def kill_tree(root: int) -> None:
    """Kill a process and all that it has started, in whatever session they are."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name is in parentheses, and may have some.
            parent = file.read_text(errors="replace").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(file.parent.name))
    found = [root]
    for process in found:
        found += children[process]
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
