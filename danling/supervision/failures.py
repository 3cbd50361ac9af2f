"""What a process leaves behind when it fails: the error file of torchrun, and a picture of the memory."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from danling.utils.files import json_text, write_atomically

from .telemetry import memory_figures

logger = logging.getLogger("danling")

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_BROKEN = ("connection closed by peer", "connection reset by peer", "broken pipe", "nccl communicator was aborted")
_GRACE_SECONDS = 3.0
_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def record_failures() -> bool:
    """Write the error file of `torch.distributed.elastic` when an exception ends this process; then print it as ever.

    torchrun shows the traceback of the rank that failed first, and needs that file for it. A script that is wrapped in
    torch's `record` has written its own, which stays. The hook is set once a process and remains: an exception may
    come after the runner has closed.

    A rank that fails only since another one has gone waits a moment first, in which torchrun ends it: what is seen last
    is the traceback that explains the others.

    Returns:
        Whether this process is one of torchrun's.
    """
    if not os.environ.get(_ERROR_FILE):
        return False
    if not getattr(sys.excepthook, "_danling", False):
        sys.excepthook = _recording(sys.excepthook)
    return True


def _recording(previous: _ExceptHook) -> _ExceptHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            if lost_a_peer(error):
                time.sleep(_GRACE_SECONDS)
            _write_error_file(error, trace)
        previous(kind, error, trace)

    hook._danling = True  # type: ignore[attr-defined]
    return hook


def lost_a_peer(error: BaseException) -> bool:
    """Return whether an error says that the connection to another rank broke, and so follows from that one's failure."""
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _BROKEN)


def _write_error_file(error: Exception, trace: TracebackType | None) -> None:
    file = Path(os.environ[_ERROR_FILE])
    if file.exists() and file.stat().st_size:
        return
    # The form is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception, which formats
    # the exception that is being handled: in a hook there is none.
    stack = "".join(traceback.format_exception(type(error), error, trace))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    try:
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        write_atomically(file, json_text({"message": message}))
    except OSError as failure:
        logger.warning("The error file %s cannot be written: %s.", file, failure)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of the device or of the host ran out."""
    on_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_host or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def write_memory_snapshot(
    directory: str | os.PathLike[str], error: BaseException, *, rank: int, global_step: int, device: torch.device
) -> list[Path]:
    """Write what is known of the memory after it ran out. Nothing that goes wrong here hides the error.

    `oom-rank-00000-step-000000000005.json` holds the error, the peaks in GiB and the counters of the allocator. With
    CUDA a `.pickle` beside it is the allocator's own snapshot, for https://pytorch.org/memory_viz; it tells where blocks were
    allocated when `profiling.profile_memory` was on.

    Returns:
        The files that were written.
    """
    stem = Path(directory) / f"oom-rank-{rank:05d}-step-{global_step:012d}"
    record: dict[str, Any] = {"error": f"{type(error).__name__}: {error}", "rank": rank, "global_step": global_step}
    written: list[Path] = []
    try:
        record["figures"] = memory_figures(device)
        if device.type == "cuda":
            record["allocator"] = dict(torch.cuda.memory_stats(device))
        stem.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stem.with_suffix(".json"), json_text(record))
        written.append(stem.with_suffix(".json"))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(stem.with_suffix(".pickle")))  # type: ignore[no-untyped-call]
            written.append(stem.with_suffix(".pickle"))
        logger.error("Out of memory at step %d; what was in it: %s", global_step, written[-1])
    except Exception:
        logger.exception("The memory could not be written down; the error itself follows.")
    return written
