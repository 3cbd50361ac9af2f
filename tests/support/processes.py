"""Run a function in several real processes that can form a gloo group, in a fraction of a second.

    from support.processes import run_processes

    def _sum_of_ranks(offset: int) -> float:            # a function of the test module, run once in each process
        with MyRunner(config) as runner: ...             # RANK, WORLD_SIZE, MASTER_ADDR ... are set: `env://` works

    def test_sum() -> None:
        assert run_processes(_sum_of_ranks, 10, world_size=2) == [..., ...]     # values by rank

Whatever has to start a process quickly starts it here: `run_processes` calls a function of a test module in new ranks; `fork` calls one,
or a closure, with all objects of the test, in a process that SIGKILL meets alone. `support.warm` runs programs by their names (`python`,
`torchrun`, `danling`) in forks of the same server.

The processes are forked from a server that has torch loaded: itself a fork of pytest with all test files loaded (`fork_server`), or
else a process that takes ten seconds to start, once for a whole test session. Arguments and values are pickled; a child starts with the
environment and the working directory of the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from .patience import patience
from .preloading import MODULES, preload
from .process_tree import descendants, die_with_parent, kill_tree

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(MODULES)
_STACKS = signal.SIGRTMIN + 7
"""Has a rank write the stacks of its threads: a signal that no program of the tests uses."""


class ProcessFailure(AssertionError):
    """A rank died, hung, or raised something that cannot be carried to the test."""


class RankTraceback(Exception):
    """The traceback of a rank, as the cause of the error that is raised in the test."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: a negative exit code is a signal; the error is a `ProcessFailure` when it died or did not end in time."""

    rank: int
    value: Any
    error: BaseException | None
    traceback: str
    exit_code: int | None


def run_processes(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run a function in some processes at once, with the options of `run_outcomes`, and return its values by rank."""
    outcomes = run_outcomes(function, *args, **options)
    by_rank = sorted(outcomes, key=lambda outcome: outcome.rank)
    failed = next((outcome for outcome in outcomes if outcome.error is not None), None)
    if failed is not None and failed.error is not None:
        raise failed.error from RankTraceback(_report(by_rank))
    return [outcome.value for outcome in by_rank]


def run_outcomes(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 60.0,
    init_process_group: bool = False,
    environment: Mapping[str, str] | None = None,
    grace: float = 5.0,
    stop: threading.Event | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Run `function(*args, **kwargs)` in `world_size` processes, and return how every rank ended, in the order in which they ended."""
    parts = _by_file(function), pickle.dumps((args, kwargs))
    with _launched(parts, world_size, init_process_group, environment or {}) as members:
        return _collect(
            members, time.monotonic() + patience(timeout), timeout, patience(grace), stop
        )


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    pipe: connection.Connection
    report: tuple[float, bool, bytes, str] | None = None
    killed: bool = False
    released: bool = False


@contextlib.contextmanager
def _launched(
    parts: tuple[tuple[str, str, str], bytes],
    world_size: int,
    init_process_group: bool,
    environment: Mapping[str, str],
) -> Iterator[list[_Member]]:
    members: list[_Member] = []
    port, held = _held_port()
    variables = {**os.environ, **_launch_variables(world_size, port), **environment}
    try:
        for rank in range(world_size):
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_enter, args=(theirs, *parts, own, os.getcwd(), init_process_group)
            )
            process.start()
            theirs.close()
            members.append(_Member(rank, process, ours))
        yield members
    finally:
        for member in members:
            _end(member)
        held.close()


def _launch_variables(world_size: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at this moment.

    It lies below those that the kernel hands out by itself, so that no connection made meanwhile takes it.
    """
    port, held = _held_port()
    held.close()
    return port


def _held_port() -> tuple[int, socket.socket]:
    """Return a free port, and what keeps others from taking it until a rank listens there: on a busy machine that may be seconds later."""
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, 32_000)
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        # Only now, after it was found to be nobody's: those who set this too, as every server of torch does, may bind it beside this one.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return port, held
    raise OSError("Expected a free port between 15000 and 32000. Received none in 100 tries.")


def fork_server(load: Callable[[], object] = lambda: None) -> None:
    """Have the server be a fork of this process as it stands: what is loaded here need not be loaded there again.

    Call once, in the main thread, before any test has run. What else the server needs it loads when it is first asked for a process, and
    calls `load` at once.
    """
    server: Any = forkserver._forkserver
    if sys.version_info >= (3, 14) or sys.platform != "linux" or server._forkserver_pid is not None:
        return  # 3.14 hands a key over when it starts the server
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            _serve(listener, alive, load)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = (
        address,
        ours,
        pid,
    )


def _serve(listener: socket.socket, alive: int, load: Callable[[], object]) -> None:
    """Be the server, once somebody asks for a process, until this process's parent is gone."""
    try:
        die_with_parent()
        # Those of pytest, which a program that sets up its own log would find.
        logging.root.handlers.clear()
        load()
        # What pytest has changed is as in any other process. By line, since every fork would print again what waits in a buffer.
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = open(number, "w" if number else "r", 1, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        for kind in (PendingDeprecationWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
        sys.meta_path[:] = [
            finder
            for finder in sys.meta_path
            if type(finder).__module__ != "_pytest.assertion.rewrite"
        ]
        select.select([listener.fileno(), alive], [], [])
        preload()
        forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


_servers: list[BaseProcess] = []


def start_server(function: Callable[..., None], *args: Any) -> None:
    """Run `function(ready, *args)` in a fork that lives as long as this process, and wait until it sends something over `ready`."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    _servers.append(process)
    ours.recv()


def server_processes() -> set[int]:
    """Return the ids of the helpers that live for the whole session."""
    server = getattr(forkserver, "_forkserver", None)
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    pids = getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)
    return {pid for pid in (*pids, *(server.pid for server in _servers)) if pid is not None}


def _collect(
    members: Sequence[_Member],
    end: float,
    timeout: float,
    grace: float,
    stop: threading.Event | None,
) -> list[Outcome]:
    """Wait for all members, shorten the wait once one has failed, kill who is late."""
    open_members = list(members)
    outcomes: list[tuple[float, Outcome]] = []
    while open_members:
        _release(members)
        waiting: list[Any] = [m.pipe for m in open_members if m.report is None]
        waiting += [m.process.sentinel for m in open_members]
        left = max(end - time.monotonic(), 0)
        # An event cannot be waited for together with pipes.
        connection.wait(waiting, timeout=left if stop is None else min(left, 0.02))
        late = time.monotonic() >= end or (stop is not None and stop.is_set())
        if late:
            _kill(open_members)
        for member in list(open_members):
            _receive(member)
            if member.process.is_alive() and not late:
                continue
            outcome = _conclude(member, timeout)
            # Of several that have ended since the last look, the one goes first that was the first to say so.
            outcomes.append((member.report[0] if member.report else time.monotonic(), outcome))
            open_members.remove(member)
            if outcome.error is not None:
                end = min(end, time.monotonic() + grace)
    return [outcome for _, outcome in sorted(outcomes, key=lambda entry: entry[0])]


def _release(members: Sequence[_Member]) -> None:
    """Let the first rank end once all others have returned or ended: it keeps the store by which they may still be connecting."""
    first, *others = members
    for member in members:
        _receive(member)
    if not first.released and all(other.report or not other.process.is_alive() for other in others):
        first.released = True
        with contextlib.suppress(OSError):
            first.pipe.send_bytes(b"")


def _kill(members: Sequence[_Member]) -> None:
    """Kill who has not ended, all at once: who goes last would tell of the others' broken connections."""
    for member in members:
        _receive(member)
    living = [member for member in members if member.process.is_alive()]
    ranks = [member.process.pid for member in living if member.process.pid is not None]
    # Where ranks wait, and then what they have started, such as workers of a loader, says what they wait for.
    for pid in [*ranks, *(child for rank in ranks for child in descendants(rank))]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) in ranks:  # others do not know this signal
                os.kill(pid, _STACKS)
                time.sleep(0.2)  # until it has written it: two at once are illegible
    for member in living:
        if member.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGSTOP)
    for member in living:
        member.killed = True
        _end(member)


def _receive(member: _Member) -> None:
    with contextlib.suppress(EOFError, OSError):
        if member.report is None and member.pipe.poll():
            member.report = pickle.loads(member.pipe.recv_bytes())


def _conclude(member: _Member, timeout: float) -> Outcome:
    hung = member.killed or member.process.is_alive()
    if not hung:
        # It may have ended between the last look into the pipe and the look at the process.
        _receive(member)
    _end(member)
    code = member.process.exitcode
    if member.report is not None:
        _, returned, payload, text = member.report
        carried = pickle.loads(payload)
        if not returned:
            return Outcome(member.rank, None, carried, text, code)
        if (not hung and code == 0) or (member.rank == 0 and not member.released):
            return Outcome(member.rank, carried, None, "", 0)
    if hung:
        fate = f"did not end: killed (timeout {timeout:g} s, less once another rank has failed)"
    else:
        fate = f"died with exit code {code}" + (
            " after it had returned" if member.report is not None else ""
        )
    return Outcome(member.rank, None, ProcessFailure(f"Rank {member.rank} {fate}."), "", code)


def _end(member: _Member) -> None:
    """Kill what is left of a member and of what it has started."""
    pid = member.process.pid
    if member.process.is_alive() and pid is not None:
        kill_tree(pid)
    member.process.join()
    _receive(member)  # it may have failed since the last look
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Its loader workers are orphans by now, but they have kept its process group.
        os.killpg(pid or 0, signal.SIGKILL) if pid else None
    member.pipe.close()


def _report(outcomes: Sequence[Outcome]) -> str:
    parts = [
        f"Rank {o.rank} (exit code {o.exit_code}):\n{o.traceback or o.error or 'returned'}"
        for o in outcomes
    ]
    return "\n".join(parts)


# In the child


def _enter(
    pipe: connection.Connection,
    function: tuple[str, str, str],
    arguments: bytes,
    variables: dict[str, str],
    directory: str,
    init_process_group: bool,
) -> None:
    # A full collection, of which every run makes some, would go through (and so copy) all that the server has loaded.
    gc.freeze()
    die_with_parent()
    os.setpgid(0, 0)
    faulthandler.register(_STACKS, file=2)
    # What it starts itself, such as workers of a loader, starts as in any other program: not by a server of its own.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    try:
        target = _from_file(*function)
        args, kwargs = pickle.loads(arguments)
        value = _call(target, args, kwargs, init_process_group)
        message = (time.monotonic(), True, pickle.dumps(value), "")
    except BaseException as error:
        pipe.send_bytes(
            pickle.dumps((time.monotonic(), False, _pickled_error(error), traceback.format_exc()))
        )
        # No clean-up: the other ranks see the connection break, as they do when a process dies.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    pipe.send_bytes(pickle.dumps(message))
    if variables["RANK"] == "0":
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()


def _call(target: Callable[..., Any], args: Any, kwargs: Any, init_process_group: bool) -> Any:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    if not init_process_group:
        return target(*args, **kwargs)
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(30)))
    value = target(*args, **kwargs)
    # A DDP module that is still alive when the group goes can abort the process.
    gc.collect()
    dist.destroy_process_group()
    return value


def _pickled_error(error: BaseException) -> bytes:
    try:
        if isinstance(error, KeyboardInterrupt):
            raise TypeError("it would stop pytest itself")
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return pickle.dumps(ProcessFailure(f"{type(error).__name__}: {error}"))
    return payload


def _by_file(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Describe a function by module, file and name: pytest's modules cannot be imported by name elsewhere."""
    name, module = function.__qualname__, function.__module__
    if "<" in name:
        raise ValueError(
            f"Expected a function of a module. Received: {name!r}. Move it to the top of the file."
        )
    return module, inspect.getfile(function), name


def _from_file(module: str, file: str, name: str) -> Callable[..., Any]:
    found: Any = _load(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _load(module: str, file: str) -> ModuleType:
    if module in sys.modules and getattr(sys.modules[module], "__file__", None) == file:
        return sys.modules[module]
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        return importlib.import_module(module)
    loaded = importlib.util.module_from_spec(spec)
    # Under its own name, so that classes of the test file pickle both ways.
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# Forks of the test itself


def fork(function: Callable[..., Any], *args: Any) -> int:
    """Call a function in a fork, which ends with 0 when it returns and with 1, after a traceback, when it raises; return the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        function(*args)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """Wait for the end of a fork and return its exit code; a negative one is a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> int:
    """Send SIGKILL to a fork and return its exit code, which is another one where it had ended by itself."""
    os.kill(pid, signal.SIGKILL)
    return wait(pid)


@contextlib.contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """Run `body` in a fork, which ends by a kill."""
    pid = fork(body)
    try:
        yield pid
    finally:
        kill(pid)


def hold(file: Path, marker: Path) -> None:
    """Take a lock, and keep it until the process is killed."""
    from danling.utils.locks import FileLock

    lock = FileLock(file)
    assert lock.acquire()
    marker.touch()
    time.sleep(60)
