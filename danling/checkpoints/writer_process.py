"""A process that writes checkpoints for one rank, and never runs the user's script.

A process that multiprocessing spawns imports `__main__`: a script without `if __name__ == "__main__"` would train a second time in
it, in the same directory. This one is started as its own program, is handed the state in shared memory, and ends with the
process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.locks import WRITING, FileLock

from .errors import CheckpointError

if TYPE_CHECKING:
    from .dcp import TargetWriter

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PROGRAM = f"""
import sys
# The working directory may hold a file of the name of a module.
sys.path[:] = filter(None, sys.path)
import json, signal
# A signal to the whole group is the parent's business: it finishes the save, and this process ends with it.
numbers = {[int(number) for number in _IGNORED]}
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
found = json.loads(sys.stdin.readline())
sys.path[:] = found["path"]
from {__name__} import serve
serve(found["pipe"], found["parent"], bytes.fromhex(found["key"]))
"""
_END_SECONDS = 5.0
_WATCH_SECONDS = 0.1

Address = tuple[str, int]
Request = tuple[Any, ...]
Save = Callable[[Any, Any], None]
"""Writes a payload with a writer."""


class WriterProcess:
    """The process, seen from the rank that it writes for."""

    def __init__(self) -> None:
        if not sys.executable:
            raise ValueError(
                "Expected a Python program that a process which writes checkpoints can be started with. Received: sys.executable="
                f"{sys.executable!r}, as where Python is embedded. Set checkpoint.async_mode='async': a thread writes them then."
            )
        self._start()

    def _start(self) -> None:
        self.joined = False
        """Whether it is in a group with those of the other ranks."""
        self._pipe, theirs = multiprocessing.Pipe()
        facts = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "pipe": theirs.fileno(),
            "parent": os.getpid(),
            # Tensors in shared memory are fetched over connections that this key opens.
            "key": bytes(multiprocessing.current_process().authkey).hex(),
        }
        with theirs, _signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(f"{json.dumps(facts)}\n".encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it lives and is in its group."""
        return self.joined and self._process.poll() is None

    def renew(self) -> None:
        """Replace a process that has died, or whose group has lost one."""
        if self.joined or self._process.poll() is not None:
            self.end()
            self._start()

    def open_store(self) -> Address:
        """Let the process of the first rank open the store over which all of them meet, and return where it is."""
        host = os.environ.get("MASTER_ADDR") or socket.getfqdn()
        return host, int(self._ask(("open", host)))

    def join(self, address: Address, *, rank: int, size: int) -> None:
        """Form the group with the processes of all other ranks, which are told the same."""
        self._ask(("join", address, rank, size))
        self.joined = True

    def write(self, save: Save, payload: Mapping[str, object], writer: TargetWriter) -> None:
        """Write a target together with the processes of all other ranks; `save` is a function of a module."""
        self._ask(("write", save, payload, writer))

    def _ask(self, request: Request) -> Any:
        try:
            self._pipe.send(request)
            while not self._pipe.poll(1.0):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError
            value, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise CheckpointError(
                f"Expected the process that writes checkpoints to go on. Received: {_fate(self._process)}. The next save starts "
                "another one; where memory is short, set checkpoint.async_mode='async'."
            ) from None
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """End it, by force when it is at work still or has not been asked for anything yet."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self.joined:
                self._pipe.send(None)
                self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._pipe.close()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold back what the process is going to ignore: it inherits that, and comes to ignore it only when Python has begun in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fate(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "it answers no more"
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


# In the process


def serve(pipe: int, parent: int, key: bytes) -> None:
    """Do what the parent asks, one thing after the other, until it says so or ends."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    multiprocessing.current_process().authkey = key
    actions = _Actions()
    with Connection(pipe) as connection:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                request = None
            if request is None:
                # No ceremony with the other processes, which may be gone.
                os._exit(0)
            connection.send(_answer(actions, request))
            del request


def _end_with(parent: int) -> None:
    # The pipe does not tell: workers that the parent has forked hold its end too. A signal at the parent's death would come when the
    # thread ends that started this process.
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _answer(actions: _Actions, request: Request) -> tuple[Any, BaseException | None]:
    name, *arguments = request
    try:
        return getattr(actions, name)(*arguments), None
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, CheckpointError(f"{type(error).__name__}: {error}")
        return None, error


class _Actions:
    """What the process can be asked for."""

    def __init__(self) -> None:
        self._store: Any = None

    def open(self, host: str) -> int:
        from torch import distributed as dist

        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def join(self, address: Address, rank: int, size: int) -> None:
        from torch import distributed as dist

        alone = dist.HashStore()  # type: ignore[attr-defined]
        store = alone if size == 1 else dist.TCPStore(*address, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def write(self, save: Save, payload: dict[str, Any], writer: TargetWriter) -> None:
        # Its own lock, since that of the run falls when the parent is killed, and this process may be in the middle of a call then:
        # a restart waits until it has ended as well.
        own = FileLock(Path(writer.path).parent.parent / f"{WRITING}{socket.gethostname()}-{os.getpid()}")
        own.acquire()
        try:
            save(payload, writer)
        finally:
            own.release()


def meet(process: WriterProcess, exchange: Callable[[Any], list[Any]], *, rank: int, size: int) -> None:
    """See to it that the processes of all ranks live and form a group. Call on all ranks."""
    if all(exchange(process.usable)):
        return
    process.renew()
    found: Any = None
    if rank == 0:
        try:
            found = process.open_store()
        except CheckpointError as error:
            found = str(error)
    found = exchange(found)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    process.join(found, rank=rank, size=size)
