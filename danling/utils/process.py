"""What surrounds this process: torchrun, a notebook, the machine and its ports. No torch is imported."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .files import NEW_FILE, staged_path

if TYPE_CHECKING:
    import torch

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names the file in which torchrun looks for the error of a rank."""
LAUNCH_COMMAND = "DANLING_LAUNCH_COMMAND"
"""Variable in which another launcher than torchrun tells its command line up to the program, as words of a shell."""


def launch_command(processes: int) -> list[str]:
    """Return the words by which a program of Python was started on so many processes, up to the name of the program.

    On several machines, other options of torchrun, such as the address of the first one, are not known to the processes that it starts.
    """
    told = os.environ.get(LAUNCH_COMMAND)
    if told:
        return [*shlex.split(told), "python"]
    if processes == 1:
        return ["python"]
    here, machines = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    on_one = ["torchrun", "--nproc-per-node", here or str(processes)]
    return on_one if machines in (None, "1") else [*on_one, "--nnodes", machines]


def shown_by_torchrun() -> bool:
    """Return whether torchrun has started this process, and shows its error at the end."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


class FirstFailure(NamedTuple):
    """Describes the rank of this machine that failed first."""

    rank: str
    second: int
    """Time of its failure, in whole seconds since 1970."""
    headline: str
    """The line that its error is known by."""


def first_failure(error: BaseException) -> tuple[FirstFailure, bool]:
    """Return which rank of this machine failed first under torchrun, and whether it is this one.

    A process that torchrun has not started is its own first rank.
    """
    own = FirstFailure(os.environ.get("RANK", "?"), int(time.time()), headline_of(error))
    if not shown_by_torchrun():
        return own, True
    # One directory for each attempt, with one below it for each rank.
    marker = Path(os.environ[ERROR_FILE]).parent.parent / "first-failure"
    staged = staged_path(marker)
    try:
        with os.fdopen(os.open(staged, NEW_FILE, 0o600), "w", encoding="utf-8") as file:
            json.dump(own, file)
        # The name appears together with its content: a rank that fails at the same time finds nothing or all of it.
        os.link(staged, marker)
        return own, True
    except FileExistsError:
        return FirstFailure(*json.loads(marker.read_text(encoding="utf-8"))), False
    except OSError:
        return own, True
    finally:
        with suppress(OSError):
            staged.unlink()


def headline_of(error: BaseException) -> str:
    """Return the one line that an error is known by."""
    return f"{type(error).__name__}: {error}"


def in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter; a terminal of IPython is none. IPython is not imported for it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port of 127.0.0.1 that no other process is given inside: until one listens there, seconds may pass.

    A server that sets `SO_REUSEADDR`, as each of torch does, may listen there meanwhile.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        # Only now, after it was found to be free.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(held.getsockname()[1])


def process_space() -> str:
    """Return a text that is equal in two processes if each sees the other one by its process id."""
    try:
        # Containers may have the name of their machine.
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def is_gone(pid: int) -> bool:
    """Return whether a process of this machine has ended; one that its parent has not asked about is still listed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # The name of the process is in parentheses, and may have some.
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


@cache
def processor_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def arithmetic(device: torch.device) -> dict[str, str]:
    """Return what the order and the instructions of this process's arithmetic follow from."""
    import torch  # only here, since torch takes its time

    from danling.utils.devices import device_name

    return {
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "processor": processor_name() if device.type == "cpu" else device_name(device),
    }
