"""Stop, kill and resume a small training on the devices that are there, and say what works on this machine.

With --script -- PROGRAM: the same with a program of yours. With --quick -- PROGRAM: whether it trains, saves, resumes and evaluates at all.

A training runs without a break on one or two accelerators, or on two processes of the CPU over gloo; another one is stopped by SIGTERM,
resumed, killed by SIGKILL and resumed, once with each kind of checkpoint that a stack writes by default (a file, a sharded one). Digests of
all updates must be bitwise the same: samples, gradients, weights, optimizer. Then the C++ compiler is tried by torch.compile. With
--remote URL an object store is tried instead: put, get, list, delete, writes on a condition, and the clock. Exit code 1 says that something
that is installed does not work.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .output import DAMAGED, OK, add_json, at_least, print_json

_UPDATES = 6
"""Updates of the doctor's own program up to the stop, the kill and the end."""

# Between -1 and 1, sin(x) + 1 is far from 0: close to it, the last bit of the sine is more than a comparison allows.
_COMPILE = """
import torch
from danling.utils.devices import accelerator_type
x = torch.linspace(-1, 1, 8, device=accelerator_type() or "cpu").requires_grad_()
expected = (x.sin() + 1).relu()
received = torch.compile(lambda x: (x.sin() + 1).relu())(x)
received.sum().backward()
assert torch.allclose(received, expected), f"the compiled function returns {received.tolist()} for {expected.tolist()}"
"""
_EXCEPTION = re.compile(
    r"[\w.]*(Error|Exception|Interrupt|NotFound|Damaged|Mismatch|Failed|Compiler)\b.*: \S"
)
"""The line that ends the traceback of an exception."""


@dataclass
class Check:
    """The result of one check; its state is `ok`, `failed`, or `absent` if something is not installed."""

    name: str
    state: str
    detail: str
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    from danling.config.names import BACKENDS  # torch

    parser.add_argument(
        "--skip", nargs="+", default=[], choices=("torch", *BACKENDS, "compile"), help="leave out"
    )
    parser.add_argument(
        "--timeout",
        type=at_least(1, float),
        default=180.0,
        help="seconds that one check may take (default: 180)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="train on two processes of the CPU, and hide CUDA devices",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--remote", metavar="URL", help="try an object store instead, such as s3://bucket/prefix"
    )
    instead.add_argument(
        "--script",
        action="store_true",
        help="stop, kill and resume the program behind `--` instead, as in: danling doctor --script -- python train.py",
    )
    instead.add_argument(
        "--quick",
        nargs="?",
        type=at_least(1),
        const=3,
        metavar="UPDATES",
        help="have the program behind `--` make 3 updates, save, resume, make 3 more and evaluate 3 batches, in a scratch directory",
    )
    parser.add_argument(
        "--updates",
        type=at_least(2),
        default=8,
        help="with --script: updates up to the stop, the kill and the end (default: 8)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the checks one after the other; print each as it ends."""
    if options.program and not options.script and options.quick is None:
        raise ValueError(
            f"Expected --script or --quick before a program. Received: {' '.join(options.program)!r} without it. "
            "Write `danling doctor --script -- ...`."
        )
    if options.cpu:
        # Before torch looks; the programs that are started have it too.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.remote is not None:
        examined = _examine_store(options.remote)
    elif options.quick is not None:
        examined = _try_quickly(options.program, options.quick, options.timeout)
    elif options.script:
        examined = _examine_program(options.program, options.updates, options.timeout)
    else:
        examined = examine(set(options.skip), options.timeout)
    checks = []
    for check in examined:
        checks.append(check)
        if not options.json:
            took = f"  ({check.seconds:.1f} s)" if check.seconds else ""
            print(f"{check.state:7} {check.name:28} {check.detail}{took}", flush=True)
    if options.json:
        print_json({"checks": [asdict(check) for check in checks]})
    return DAMAGED if any(check.state == "failed" for check in checks) else OK


def examine(skip: set[str], timeout: float) -> Iterator[Check]:
    """Yield the checks as they end."""
    from danling.config.names import BACKENDS  # torch

    if "torch" not in skip:
        yield _timed("torch", _try_torch)
    kinds = [backend for backend in BACKENDS if backend not in skip]
    if kinds:
        processes, where = _devices()
        yield Check("device", "ok", where)
        for backend in kinds:
            # The doctor's own program, which writes one kind of checkpoints.
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(processes)]
            command += ["-m", "danling.cli.doctor_job", backend]
            try:
                for check in _examine_program(command, _UPDATES, timeout):
                    yield Check(f"{check.name} ({backend})", check.state, check.detail)
            except ValueError as error:  # with the end of what the program printed
                yield Check(f"train ({backend})", "failed", cause(str(error)))
    if "compile" not in skip:
        yield _timed("compile", lambda: _try_compiler(timeout))


def _devices() -> tuple[int, str]:
    """Return on how many processes the doctor trains, and on what."""
    import torch

    from danling.utils.devices import accelerator_type, device_name

    kind = accelerator_type()
    if kind is None:
        return 2, "2 processes on the CPU: no accelerator that torch can use"
    count = torch.accelerator.device_count()
    name = device_name(torch.device(kind, 0))
    if count == 1:
        return 1, f"1 process on {kind} ({name}; 1 in all)"
    return 2, f"2 processes on {kind} ({name}; {count} in all)"


def _examine_program(program: Sequence[str], updates: int, timeout: float) -> Iterator[Check]:
    from danling.audit.resuming import ResumeCheck  # torch

    with tempfile.TemporaryDirectory(prefix="danling-doctor-") as folder:
        check = ResumeCheck(program, Path(folder), updates=updates, timeout=timeout)
        for found in check.examine():
            yield Check(*found)


def _try_quickly(program: Sequence[str], updates: int, timeout: float) -> Iterator[Check]:
    from danling.audit.quick import try_quickly  # torch

    with tempfile.TemporaryDirectory(prefix="danling-doctor-") as folder:
        yield Check(
            "quick run", "ok", try_quickly(program, Path(folder), updates=updates, timeout=timeout)
        )


def _examine_store(url: str) -> Iterator[Check]:
    """Try what a run asks of a store: nothing is left there."""
    # Only a user with a store needs this.
    from danling.remote.lease import trials
    from danling.remote.store import open_store

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
        state = "failed"
        detail = str(error)
    return Check(name, state, detail, round(time.monotonic() - start, 2))


def _try_torch() -> tuple[str, str]:
    """Look up the private names of torch that the library uses."""
    import torch

    from danling.utils.torch_private import PRIVATE_NAMES, TESTED, missing_names

    version = torch.__version__
    tested = f"tested with {TESTED[0]} to {TESTED[-1]}"
    missing = missing_names(version)
    if missing:
        raise RuntimeError(
            f"{version} ({tested}) lacks {', '.join(missing)}. Install a tested release."
        )
    return (
        "ok",
        f"{version} ({tested}): all {len(PRIVATE_NAMES)} private names that the library uses",
    )


def _try_compiler(timeout: float) -> tuple[str, str]:
    """Compile a function in a process, where there is a compiler."""
    from danling.graph.compiler import cxx_command, cxx_version  # torch

    found = cxx_version()
    # Only stack=graph and compile.enable need one: a machine without a compiler is in order.
    if found is None:
        return (
            "absent",
            f"{cxx_command()} does not run; for stack=graph and compile.enable install g++, or name one in CXX",
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMPILE], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end in {timeout:g} s, with {found}") from None
    if done.returncode:
        raise RuntimeError(f"{cause(done.stderr) or f'exit code {done.returncode}'}, with {found}")
    return "ok", f"forward and backward, with {found}"


def cause(text: str) -> str:
    """Return the line of a program's output that says why it failed: the last exception, else the last line."""
    # torch begins the lines of a rank's traceback with its number.
    lines = [line.strip() for line in re.sub(r"(?m)^\[rank\d+\]: ?", "", text).strip().splitlines()]
    return ([line for line in lines if _EXCEPTION.match(line)] or lines or [""])[-1]
