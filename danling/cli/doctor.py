"""Train, save, kill and resume on two local processes, and say what works on this machine.

With --script -- PROGRAM: stop a program of yours by SIGTERM, kill it by SIGKILL, resume it, and say whether each comes back bitwise.

Two processes train over gloo without a break; two others are ended by SIGKILL and resumed, once from each kind of checkpoint
that a stack writes by default (a file, a sharded one). What they end with must be bitwise the same: weights, optimizer,
schedule, random streams. Then the compiler, torch.compile, nccl and the optional packages are tried. With --remote URL an object
store is tried instead: put, get, range, list, an upload in parts, create, match, the clock, delete. Exit code 1 says that something
that is installed does not work.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from danling.config.names import BACKENDS
from danling.graph.compiler import cxx_command, cxx_version
from danling.utils.process import held_port

from .ending import SIGTERM
from .environment import EXTRAS, installed, module_of
from .output import DAMAGED, OK, add_json, print_json

RANKS = 2

HALT_AT = 11
"""Step at which training is killed: two after the last checkpoint, so that there is something to lose."""

HALTED, DIGEST = "halted", "digest"
"""Files with which the processes that are started here say that they stand still, and what they ended with."""

_PROBES = {
    "torch": "import torch; print(torch.__version__)",
    "compile": (
        "import torch; f = torch.compile(lambda x: (x.sin() + 1).relu()); x = torch.randn(8, requires_grad=True); "
        "f(x).sum().backward(); assert torch.allclose(f(x), (x.sin() + 1).relu()); print('forward and backward')"
    ),
    "nccl": (
        "import torch; from torch import distributed as d; n = torch.cuda.device_count(); "
        "print(f'{n} CUDA devices' if d.is_nccl_available() and n else 'absent')"
    ),
}


_EXCEPTION = re.compile(
    r"[\w.]*(Error|Exception|Interrupt|InvalidCxxCompiler|NotFound|Damaged|Mismatch|BackendCompilerFailed)\b.*: \S"
)
"""The line that ends the traceback of an exception."""


@dataclass
class Check:
    """What came of one check.

    Attributes:
        name: What was tried.
        state: `ok`, `failed`, or `absent` for what is not installed.
        detail: A version, a figure, or why it failed.
        seconds: How long it took.
    """

    name: str
    state: str
    detail: str
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--skip",
        nargs="+",
        default=[],
        choices=("train", *BACKENDS, "compile", "nccl", "extras"),
        help="leave out",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=180.0, help="seconds that one check may take (default: 180)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--remote", metavar="URL", help="try an object store instead, such as s3://bucket/prefix")
    instead.add_argument(
        "--script",
        action="store_true",
        help="stop, kill and resume the program behind `--` instead, as in: danling doctor --script -- python train.py",
    )
    parser.add_argument(
        "--updates",
        type=_updates,
        default=8,
        help="with --script: updates up to the stop, the kill and the end (default: 8)",
    )
    parser.add_argument(
        "--lineage",
        help="with --script: of several runs that the program makes, the one of this lineage (default: any)",
    )
    add_json(parser)


def _updates(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"Expected a number of updates of at least 2. Received: {text!r}.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"Expected a number of seconds above 0. Received: {text!r}.")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Run the checks one after the other; print each as it ends."""
    checks = []
    for check in _checks(options):
        checks.append(check)
        if not options.json:
            took = f"  ({check.seconds:.1f} s)" if check.seconds else ""
            print(f"{check.state:7} {check.name:24} {check.detail}{took}", flush=True)
    if options.json:
        print_json({"checks": [asdict(check) for check in checks]})
    return DAMAGED if any(check.state == "failed" for check in checks) else OK


def _checks(options: argparse.Namespace) -> Iterator[Check]:
    if options.remote is not None:
        return _examine_store(options.remote)
    if options.script:
        return _examine_script(options.program, options.updates, options.timeout, options.lineage)
    if options.program:
        raise ValueError(
            f"Expected --script before a program. Received: {' '.join(options.program)!r} without it. "
            "Write `danling doctor --script -- ...`."
        )
    return examine(set(options.skip), options.timeout)


def examine(skip: set[str], timeout: float) -> Iterator[Check]:
    """Yield the checks as they end."""
    yield _timed("torch", lambda: _probe("torch", timeout))
    with tempfile.TemporaryDirectory(prefix="danling-doctor-") as name:
        place = Path(name)
        if "train" not in skip:
            yield _timed("train (gloo)", lambda: _whole(place, timeout))
        for backend in BACKENDS:
            if not skip & {"train", backend}:
                yield _timed(f"kill and resume ({backend})", partial(_resume, place, backend, timeout))
    if "compile" not in skip:
        yield (compiler := _timed("compiler", _compiler))
        if compiler.state == "ok":
            yield _timed("compile", partial(_probe, "compile", timeout))
    if "nccl" not in skip:
        yield _timed("nccl", partial(_probe, "nccl", timeout))
    if "extras" not in skip:
        for package in EXTRAS:
            yield _timed(package, partial(_extra, package, timeout))


def _examine_script(program: Sequence[str], updates: int, timeout: float, lineage: str | None) -> Iterator[Check]:
    """Stop, kill and resume a program of the user's, in a directory that is removed."""
    from danling.audit.resuming import ResumeCheck  # torch

    with tempfile.TemporaryDirectory(prefix="danling-doctor-") as folder:
        check = ResumeCheck(program, Path(folder), updates=updates, timeout=timeout, lineage=lineage)
        for found in check.examine():
            yield Check(*found)


def _examine_store(url: str) -> Iterator[Check]:
    """Try what a run asks of a store: nothing is left there."""
    # Only a user with a store needs this.
    from danling.remote import open_store
    from danling.remote.lease import trials

    for name, trial in trials(open_store(url)).items():
        check = _timed(name, trial)
        yield check
        if name == "objects" and check.state == "failed":
            return  # the others need objects as well


def _timed(name: str, check: Callable[[], tuple[str, str]]) -> Check:
    start = time.monotonic()
    try:
        state, detail = check()
    except (RuntimeError, OSError) as error:
        state, detail = "failed", str(error)
    return Check(name, state, detail, round(time.monotonic() - start, 2))


def _extra(package: str, timeout: float) -> tuple[str, str]:
    found = installed(package)
    if found is None:
        return "absent", "not installed"
    _output(["-c", f"import {module_of(package)}"], timeout)
    return "ok", f"{found}, imports"


def _compiler() -> tuple[str, str]:
    version = cxx_version()
    if version is not None:
        return "ok", version
    return "absent", f"{cxx_command()} does not run; for stack=graph and compile.enable install g++, or name one in CXX"


def _probe(name: str, timeout: float) -> tuple[str, str]:
    said = _output(["-c", _PROBES[name]], timeout)
    return ("absent", "no CUDA device with nccl") if said == "absent" else ("ok", said)


def _output(arguments: Sequence[str], timeout: float) -> str:
    """Run Python with these arguments and return what it prints."""
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end in {timeout:g} s") from None
    if done.returncode:
        raise RuntimeError(cause(done.stderr) or f"exit code {done.returncode}")
    return done.stdout.strip()


def _train(directory: Path, backend: str, timeout: float) -> str:
    """Train to the end and return the digest of the last state and the step that training began at."""
    directory.mkdir(exist_ok=True)
    with _pair(directory, backend) as processes:
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            if time.monotonic() > end:
                raise RuntimeError(f"training did not end in {timeout:g} s: {_said(directory)}")
            time.sleep(0.05)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"exit codes {[process.returncode for process in processes]}: {_said(directory)}")
    return (directory / DIGEST).read_text(encoding="utf-8").strip()


def _whole(place: Path, timeout: float) -> tuple[str, str]:
    """Train without a break; what comes of it is what the others are compared with."""
    digest = _train(place / "whole", BACKENDS[0], timeout)
    return "ok", f"{RANKS} processes, state {digest[:12]}"


def _resume(place: Path, backend: str, timeout: float) -> tuple[str, str]:
    """Train up to a step, kill both processes, train on, and compare with what was not killed."""
    directory = place / f"killed-{backend}"
    directory.mkdir()
    with _pair(directory, backend, "--halt-at", str(HALT_AT)) as processes:
        end = time.monotonic() + timeout
        while not all((directory / f"{HALTED}-{rank}").exists() for rank in range(RANKS)):
            if time.monotonic() > end or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"training did not come to step {HALT_AT}: {_said(directory)}")
            time.sleep(0.05)
    killed = [process.returncode for process in processes]
    if killed != [-signal.SIGKILL] * RANKS:
        raise RuntimeError(f"expected both processes to be killed, exit codes {killed}")
    resumed, step = _train(directory, backend, timeout).split()
    whole, _ = (place / "whole" / DIGEST).read_text(encoding="utf-8").split()
    if resumed != whole:
        raise RuntimeError(f"resumed at step {step}, but not bitwise equal: {resumed[:12]} instead of {whole[:12]}")
    if step == "0":
        raise RuntimeError("no checkpoint was found after the kill: training began anew")
    return "ok", f"killed at step {HALT_AT}, resumed at step {step}, bitwise equal"


@contextmanager
def _pair(directory: Path, backend: str, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes; when the context ends, those that still run are ended by SIGKILL."""
    command = [sys.executable, "-m", "danling.cli.doctor_job", str(directory), "--backend", backend, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with held_port() as port:
            for rank in range(RANKS):
                # Beside the run directory's own files: what was said is shown when something fails.
                with (directory / f"output-{rank}.txt").open("wb") as output:
                    environment = _environment(rank, str(port))
                    with SIGTERM.held():
                        processes.append(
                            subprocess.Popen(
                                command,
                                env=environment,
                                stdin=subprocess.DEVNULL,
                                stdout=output,
                                stderr=subprocess.STDOUT,
                            )
                        )
            yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _environment(rank: int, port: str) -> dict[str, str]:
    coordinates = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    loopback = {} if sys.platform != "linux" else {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    # The doctor compares bitwise on the CPU, whatever devices there are.
    return {**os.environ, **coordinates, **place, **loopback, "CUDA_VISIBLE_DEVICES": ""}


def _said(directory: Path) -> str:
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(directory.glob("output-*.txt")))
    # Both processes usually fail for one reason.
    return " | ".join(dict.fromkeys(filter(None, map(cause, texts)))) or "nothing was printed"


def cause(text: str) -> str:
    """Return the line of a program's output that says why it failed: the last exception, else the last line.

    What follows an exception, such as hints on variables to set or the frames of C++, says nothing of the cause.
    """
    lines = [line.strip() for line in re.sub(r"(?m)^\[rank\d+\]: ?", "", text).strip().splitlines()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    return (errors or lines or [""])[-1]
