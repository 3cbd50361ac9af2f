"""`python`, `torchrun` and `danling` in forks of a process that has torch loaded, for whatever starts programs by their names.

from support.warm import interpreter, variables

with Job([interpreter(), "train.py"]) as job: ...                      # seconds quicker than `sys.executable`
with Job(["bash", "-c", text], environment=variables()) as job: ...    # and so are the programs that a script of bash or torchrun starts

The process behind such a command is a fork of the server of `support.processes`; the command itself hands over its streams, passes
signals on to the fork and ends as it ends. Killed, it takes the fork with it before the server answers anybody else. What is about the
start of the interpreter, about what is imported, or about a single process id takes `sys.executable`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import inspect
import io
import json
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import process as multiprocessing_process
from multiprocessing import util as multiprocessing_util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from .process_tree import die_with_parent, kill_tree
from .processes import start_server

_ENTRIES = {"torchrun": ("torch.distributed.run", "main"), "danling": ("danling.cli.main", "main")}
_CLIENT = """#!{python} -IS
import sys
sys.path.append({folder!r})
sys.dont_write_bytecode = True
from warm_client import main
main({address!r}, {python!r})
"""


def interpreter() -> str:
    """Return the path of the warm `python`."""
    return str(programs() / "python")


def variables() -> dict[str, str]:
    """Return the variables by which programs, those of torchrun among them, are found warm."""
    return {"PATH": f"{programs()}{os.pathsep}{os.environ['PATH']}", "PYTHON_EXEC": interpreter()}


@cache
def programs() -> Path:
    """Return a directory with `python`, `python3`, `torchrun` and `danling`; the server behind them starts with the first call."""
    place = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    address = str(place / "socket")
    text = _CLIENT.format(python=sys.executable, folder=str(Path(__file__).parent), address=address)
    for name in ("python", "python3", *_ENTRIES):
        program = place / name
        program.write_text(text)
        program.chmod(0o755)
    start_server(_serve, address)
    return place


# In the server


class _Program:
    """A fork that runs, and the command that waits for it."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line = pid, line
        self.ended = os.pidfd_open(pid)


def _serve(ready: Connection, address: str) -> None:
    """Fork a process for every command that connects, until the server itself is ended."""
    die_with_parent()
    # An agent of torchrun looks up the modules of all functions that it is called by, some times. For what belongs to no file `inspect`
    # would go through the thousands that are loaded here, each time: two seconds in all.
    inspect.stack()
    inspect.modulesbyfile.update({"<frozen runpy>": "runpy", "<string>": "__main__"})
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ready.send(os.getpid())
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        ready_ones = [key.data for key, _ in selector.select()]
        for heard in filter(None, ready_ones):
            heard(selector)
        # Only now: whoever was killed is gone before another program starts, as it would be without a server between them.
        if None in ready_ones:
            _accept(selector, listener)


def _accept(selector: selectors.BaseSelector, listener: socket.socket) -> None:
    line, _ = listener.accept()
    size, streams, _, _ = socket.recv_fds(line, 8, 3)
    message = line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    pid = os.fork() if len(streams) == 3 and message else 0
    if pid == 0 and message:
        selector.close()
        _become(json.loads(message), streams, [listener, line])
    for stream in streams:
        os.close(stream)
    if not pid:
        line.close()
        return
    program = _Program(pid, line)
    selector.register(line, selectors.EVENT_READ, lambda selector: _heard(selector, program))
    selector.register(
        program.ended, selectors.EVENT_READ, lambda selector: _ended(selector, program)
    )


def _heard(selector: selectors.BaseSelector, program: _Program) -> None:
    """Pass a signal on; a command that is gone takes its program with it."""
    if program.line.fileno() < 0:
        return
    said = b""
    with contextlib.suppress(ConnectionError):
        said = program.line.recv(64)
    for number in said:
        os.kill(program.pid, number)
    if not said:
        kill_tree(program.pid)
        _ended(selector, program)


def _ended(selector: selectors.BaseSelector, program: _Program) -> None:
    """Tell the command how its program has ended."""
    if program.line.fileno() < 0:
        return
    _, status = os.waitpid(program.pid, 0)
    selector.unregister(program.ended)
    selector.unregister(program.line)
    os.close(program.ended)
    with contextlib.suppress(OSError):
        program.line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    program.line.close()


# In the fork


def _become(request: dict[str, Any], streams: list[int], inherited: list[socket.socket]) -> None:
    """Be the program that is asked for, to its end."""
    die_with_parent()
    os.setpgid(0, 0)
    for place in inherited:
        place.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for ignored in request["ignored"]:
        signal.signal(ignored, signal.SIG_IGN)
    _forget_the_server()
    _open_streams()
    code = _code_of(lambda: _run(request["name"], request["args"]))
    # A forked process leaves out what a program does last.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for written in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            written.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _forget_the_server() -> None:
    """Be nobody's worker: what the program starts, starts as in any other one, and its random numbers are its own."""
    import numpy
    import torch

    multiprocessing.set_start_method(None, force=True)
    this: Any = multiprocessing.current_process()
    this._name, this._config["daemon"] = "MainProcess", False
    multiprocessing_process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing_process._children.clear()  # type: ignore[attr-defined]
    multiprocessing_util._finalizer_registry.clear()  # type: ignore[attr-defined]
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tests = str(Path(__file__).parents[1])
    examples = str(Path(__file__).parents[2] / "examples")
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [
        *given,
        *(path for path in sys.path if path not in {tests, examples, "", *given}),
    ]
    customized = next(
        (file for path in given if (file := Path(path) / "sitecustomize.py").exists()), None
    )
    if customized is not None:
        runpy.run_path(str(customized), run_name="sitecustomize")


def _open_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _written(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _written(2, unbuffered, errors="backslashreplace")  # type: ignore[misc]


def _written(number: int, unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    raw: Any = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors=errors, line_buffering=by_line, write_through=unbuffered
    )


def _code_of(program: Callable[[], None]) -> int:
    """Return the exit code with which the interpreter would end."""
    try:
        program()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        kind, value, trace = sys.exc_info()
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        assert kind is not None and value is not None
        try:
            sys.excepthook(kind, value.with_traceback(trace), trace)
        except Exception:
            traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(name: str, args: list[str]) -> None:
    if name in _ENTRIES:
        module, function = _ENTRIES[name]
        sys.argv = [name, *args]
        _fresh_main()
        sys.exit(getattr(importlib.import_module(module), function)())
    sys.orig_argv = [sys.executable, *args]
    what, *rest = args
    if what == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        _fresh_main()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if what == "-c":
        code, file, sys.argv = rest[0], "<string>", ["-c", *rest[1:]]
        sys.path.insert(0, "")
    elif what == "-":
        code, file, sys.argv = sys.stdin.read(), "<stdin>", args
        sys.path.insert(0, "")
    else:
        try:
            code, file, sys.argv = (
                Path(what).read_text(encoding="utf-8"),
                os.path.abspath(what),
                args,
            )
        except OSError as error:
            sys.exit(f"python: can't open file {what!r}: {error}")
        sys.path.insert(0, str(Path(what).resolve().parent))
    main = _fresh_main()
    if not file.startswith("<"):
        main.__file__ = file
    exec(compile(code, file, "exec"), main.__dict__)


def _fresh_main() -> ModuleType:
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    return main
