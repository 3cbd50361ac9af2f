"""A process that writes checkpoints for one rank, and never runs the user's script.

A process that multiprocessing spawns imports `__main__`: a script without `if __name__ == "__main__"` would train a second time in
it, in the same directory. This one is started as its own program, is handed the state in shared memory, and ends with the
process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from danling.utils.locks import WRITING, FileLock

from .errors import CheckpointError

_PROGRAM = f"""
import sys
# The working directory may hold a file of the name of a module.
sys.path[:] = filter(None, sys.path)
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:], parent, key = pipe.recv()
from {__name__} import serve
serve(pipe, parent, key)
"""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_END_SECONDS = 5.0
_JOIN_SECONDS = 60.0
"""How long the processes, which have imported what they need, wait for each other: one of them may be killed meanwhile."""
_WATCH_SECONDS = 0.1

Address = tuple[str, int]


class WriterProcess:
    """The process, seen from the rank that it writes for."""

    def __init__(self) -> None:
        if not sys.executable:
            raise ValueError(
                "Expected a Python program that a process which writes checkpoints can be started with. Received: sys.executable="
                f"{sys.executable!r}, as where Python is embedded. Set checkpoint.async_mode='async': a thread writes them then."
            )
        self.start()

    def start(self) -> None:
        """Start it, and do not wait until it is ready, which takes seconds."""
        self._pipe, theirs = multiprocessing.Pipe()
        self._joined = False
        # It inherits that these are blocked: a signal to the whole group is for this process, which finishes the save.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            with theirs:
                command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Tensors in shared memory are fetched over connections that this key opens.
        key = bytes(multiprocessing.current_process().authkey)
        self._pipe.send(([os.path.abspath(entry) for entry in sys.path], os.getpid(), key))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it lives and is in a group with those of the other ranks."""
        return self._joined and self._process.poll() is None

    def renew(self, module: str) -> str | None:
        """Replace a process that has died or is in a group; wait until it has imported a module and can join one; return its error."""
        try:
            # A process of another rank has ended: with the rest of their group nothing can be written.
            if self._joined or self._process.poll() is not None:
                self.end()
                self.start()
            self._ask(import_module, module)
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def join(self, address: Address | None, group: int, *, rank: int, size: int) -> None:
        """Form a group with the processes of all other ranks, after `renew`. One rank has no address."""
        if address is not None:
            try:
                self._ask(join_group, address, group, rank, size, _JOIN_SECONDS)
            except BaseException:
                # With half a group it is of no use; the next save starts another one.
                self._process.kill()
                self._process.wait()
                raise
        self._joined = True

    def write(self, save: Callable[..., None], payload: dict[str, object], writer: object) -> None:
        """Write a target together with the processes of all other ranks; `save` is a function of a module."""
        self._ask(write_target, save, payload, writer)

    def _ask(self, *request: Any) -> None:
        try:
            self._pipe.send(request)
            while not self._pipe.poll(1.0):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError
            error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise CheckpointError(
                f"Expected the process that writes checkpoints to run. Received: {self._fate()}. The next save starts "
                "another one; where memory is short, set checkpoint.async_mode='async'."
            ) from None
        if error is not None:
            raise error

    def _fate(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it answers no more"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        return f"it ended with exit code {code}"

    def end(self) -> None:
        """End it, by force when it is at work still or has not been asked for anything yet."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._joined:
                self._pipe.send(None)
                self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._pipe.close()


# In the process


def serve(pipe: Connection, parent: int, key: bytes) -> None:
    """Do what the parent asks, one thing after the other, until it says so or ends."""

    def watch() -> None:
        # The pipe does not tell: workers that the parent has forked hold its end too. A signal at the parent's death would come when the
        # thread ends that started this process.
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    multiprocessing.current_process().authkey = key
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            request = None
        if request is None:
            os._exit(0)  # no ceremony with the other processes, which may be gone
        pipe.send(_answer(*request))
        # It refers to shared memory, which is freed when no process has it.
        del request


def _answer(action: Callable[..., None], *arguments: Any) -> BaseException | None:
    try:
        action(*arguments)
    except BaseException as error:
        # Some errors of torch cannot be pickled, or only one way.
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return CheckpointError(f"{type(error).__name__}: {error}")
        return error
    return None


def join_group(address: Address, group: int, rank: int, size: int, seconds: float) -> None:
    """Form a group with the other writers, over a store at an address, within some seconds."""
    from torch import distributed as dist
    from torch.distributed.constants import default_pg_timeout

    from danling.distributed import set_collective_timeout

    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    own = dist.PrefixStore(str(group), store)  # type: ignore[attr-defined]
    try:
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise CheckpointError(
            f"Expected the {size} processes that write checkpoints to find each other within {seconds:g} s. Received: {error}. One of "
            "them was ended; the next save starts others."
        ) from None
    # A write takes longer than this.
    set_collective_timeout(default_pg_timeout.total_seconds())


def write_target(save: Callable[..., None], payload: dict[str, object], writer: Any) -> None:
    """Write a target under a lock of this process."""
    # A kill of the parent releases the lock of the run, while this process may be in the middle of a call: a restart waits for this
    # lock as well.
    own = FileLock(
        Path(writer.path).parent.parent / f"{WRITING}{socket.gethostname()}-{os.getpid()}"
    )
    own.acquire()
    try:
        save(payload, writer)
    finally:
        own.release()
