"""Run a script as a program, in forks that have torch loaded (`support.warm`) where starting Python is not what a test is about.

exit_code, output = run_program("examples/digits.py", "--epochs", "1")                      # as `python examples/digits.py`
exit_code, output = run_program("examples/digits.py", "--epochs", "1", nproc_per_node=2)    # under torchrun
with torchrun("train.py") as job:
    job.wait_for_output("epoch 1")
    job.signal(signal.SIGTERM)          # torchrun forwards it to every rank and exits with 1
    job.wait()
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .job import Finished, Job
from .warm import interpreter, variables

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""Environment in which processes talk over the loopback."""


def python(
    script: str | Path, *args: str, environment: Mapping[str, str] | None = None, warm: bool = False
) -> Job:
    """Start a Python script, single-threaded, in the working directory of the test."""
    command = interpreter() if warm else sys.executable
    return Job(
        [command, str(script), *args], environment={"OMP_NUM_THREADS": "1", **(environment or {})}
    )


def run_python(
    script: str | Path,
    *args: str,
    timeout: float = 100.0,
    environment: Mapping[str, str] | None = None,
    warm: bool = False,
) -> Finished:
    """Run a Python script to its end and return exit code and output."""
    with python(script, *args, environment=environment, warm=warm) as job:
        return job.wait(timeout)


def torchrun(
    script: str | Path,
    *args: str,
    nproc_per_node: int = 2,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Start a script under torchrun, for signals, restarts and launch flags; else `support.processes` is quicker."""
    command = [interpreter(), "-m", "torch.distributed.run", "--nnodes", "1"]
    command += ["--nproc-per-node", str(nproc_per_node), "--rdzv-backend", "c10d"]
    command += [
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
        *flags,
        str(script),
        *args,
    ]
    return Job(command, environment={**LOOPBACK, **variables(), **(environment or {})})


def run_program(
    script: str | Path,
    *args: str,
    nproc_per_node: int = 1,
    timeout: float = 100.0,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a script to its end, under torchrun if there is more than one process."""
    if nproc_per_node == 1:
        return run_python(script, *args, timeout=timeout, environment=environment, warm=True)
    with torchrun(
        script, *args, nproc_per_node=nproc_per_node, flags=flags, environment=environment
    ) as job:
        return job.wait(timeout)


def numbers_in(output: str, pattern: str) -> list[float]:
    """Return what the groups of a pattern match in an output, as numbers."""
    found = re.search(pattern, output)
    assert found is not None, output
    return [float(group) for group in found.groups()]


def number_in(output: str, pattern: str) -> float:
    """Return what the one group of a pattern matches in an output, as a number."""
    (number,) = numbers_in(output, pattern)
    return number
