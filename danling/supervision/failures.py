"""What a process leaves behind when it fails: the error file of torchrun, and a picture of the memory."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from danling.reporting.telemetry import memory_figures
from danling.utils.devices import memory_stats
from danling.utils.files import write_atomically
from danling.utils.messages import clause
from danling.utils.plain import json_text
from danling.utils.process import (
    ERROR_FILE,
    FirstFailure,
    first_failure,
    headline_of,
    shown_by_torchrun,
)

logger = logging.getLogger("danling")

_BROKEN = (
    *(
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "nccl communicator was aborted",
    ),
    "connection was likely closed",
)
_GRACE_SECONDS = 3.0
_INSIDE = tuple(
    f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


def record_failures() -> bool:
    """Write the error file of `torch.distributed.elastic` when an exception ends this process.

    torchrun shows the traceback of the rank that failed first at its end, and needs that file for it. It appears there once: ranks that
    failed with the same error say so in one line, none prints it again, and frames inside of danling and torch are left out
    (`DANLING_FULL_TRACEBACK=1` keeps them). Where torchrun is going to restart the ranks it shows nothing, so the first one prints it.
    A script that is wrapped in torch's `record` has written its own, which stays. The hook is set once a process and remains: an exception
    may come after the runner has closed.

    A rank that fails only since another one has gone waits a moment first, in which torchrun ends it: the last traceback
    on the screen is the one that explains the others.

    Returns:
        Whether this process is one of torchrun's.
    """
    if not os.environ.get(ERROR_FILE):
        return False
    previous = sys.excepthook
    if getattr(previous, "_danling", False):
        return True

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            previous(kind, error, trace)
            return
        if lost_a_peer(error):
            time.sleep(_GRACE_SECONDS)
        first, is_first = first_failure(error)
        _write_error_file(error, trace, first, is_first)
        done, most = (
            os.environ.get(f"TORCHELASTIC_{name}", "0")
            for name in ("RESTART_COUNT", "MAX_RESTARTS")
        )
        if not shown_by_torchrun():
            previous(kind, error, trace)
        elif is_first and int(done) < int(most):
            sys.stderr.write(users_traceback(error, trace))

    hook._danling = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    return True


def lost_a_peer(error: BaseException) -> bool:
    """Return whether an error says that the connection to another rank broke, and so follows from that one's failure."""
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _BROKEN)


def users_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """Return a traceback without the frames inside of danling and torch: the user's own, and where it was raised."""
    summary = traceback.TracebackException(type(error), error, trace)
    left_out = 0 if os.environ.get("DANLING_FULL_TRACEBACK") else _trim(summary)
    note = f"({left_out} frames inside of danling and torch are left out; DANLING_FULL_TRACEBACK=1 shows them)\n"
    return (note if left_out else "") + "".join(summary.format())


def _trim(summary: traceback.TracebackException) -> int:
    frames = list(summary.stack)
    kept = [frame for frame in frames[:-1] if not frame.filename.startswith(_INSIDE)] + frames[-1:]
    summary.stack[:] = kept
    others = [other for other in (summary.__cause__, summary.__context__) if other is not None]
    return len(frames) - len(kept) + sum(map(_trim, others))


def _write_error_file(
    error: Exception, trace: TracebackType | None, first: FirstFailure, is_first: bool
) -> None:
    file = Path(os.environ[ERROR_FILE])
    if file.exists() and file.stat().st_size:
        return
    stack = users_traceback(error, trace)
    if not is_first and first.headline == headline_of(error):
        stack = f"{type(error).__name__}, as on rank {first.rank}, which failed first"
    # torchrun takes the earliest for the cause, and counts whole seconds.
    moment = first.second if is_first else first.second + 1
    # The form is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception, which formats
    # the exception that is being handled: in a hook there is none.
    message = {
        "message": headline_of(error),
        "extraInfo": {"py_callstack": stack, "timestamp": str(moment)},
    }
    try:
        write_atomically(file, json_text({"message": message}))
    except OSError as failure:
        logger.warning("The error file %s cannot be written: %s.", file, clause(failure))


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory"  # the allocator of the host
    r"|\b(CUDA|HIP|XPU) (driver )?error: out of memory"
    r"|Cuda failure (2 )?'out of memory'"  # NCCL
    r"|\b(CU|HIP|ROC)[A-Z]*_(STATUS_)?([A-Z]+_)*ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE
    # A handle needs memory outside of torch's allocator. torch itself takes these for a lack of it, and tries once more.
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
    r"|CUDNN_STATUS_NOT_INITIALIZED",
)
"""What the libraries below torch say in a plain `RuntimeError`; torch's own allocator raises `torch.OutOfMemoryError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of the device or of the host ran out, whichever library raised it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def write_memory_snapshot(
    directory: str | os.PathLike[str],
    error: BaseException,
    *,
    rank: int,
    global_step: int,
    device: torch.device,
) -> list[Path]:
    """Write a report about the memory after it ran out. Nothing that goes wrong here hides the error.

    `oom-rank-00000-step-000000000005.json` holds the error, the peaks in GiB and the counters of the allocator. With
    CUDA a `.pickle` next to it is the allocator's own snapshot, for https://pytorch.org/memory_viz; it tells where blocks were
    allocated when `profiling.profile_memory` was on.

    Returns:
        The files that were written.
    """
    stem = Path(directory) / f"oom-rank-{rank:05d}-step-{global_step:012d}"
    record: dict[str, Any] = {
        "error": f"{type(error).__name__}: {error}",
        "rank": rank,
        "global_step": global_step,
    }
    written: list[Path] = []
    try:
        record["figures"] = memory_figures(device)
        if counters := memory_stats(device):
            record["allocator"] = counters
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
