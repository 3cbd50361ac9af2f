"""Run a script under torchrun on this machine: for signals, restarts and launch flags; else `support.processes` is quicker.

from support.torchrun import run_torchrun, torchrun

exit_code, output = run_torchrun("examples/digits.py", "--epochs", "1")     # agent and workers are forks of `support.warm`
with torchrun("train.py", nproc_per_node=2) as job:
    job.wait_for_output("epoch 1")
    job.signal(signal.SIGTERM)          # torchrun forwards it to every rank and exits with 1
    job.wait()
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .job import Finished, Job
from .warm import interpreter, variables

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""Environment in which processes talk over the loopback."""


def torchrun(
    script: str | Path,
    *args: str,
    nproc_per_node: int = 2,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    warm: bool = True,
) -> Job:
    """Start a script under torchrun in the working directory of the test."""
    python = interpreter() if warm else sys.executable
    command = [python, "-m", "torch.distributed.run", "--nnodes", "1"]
    command += ["--nproc-per-node", str(nproc_per_node), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *flags, str(script), *args]
    variables_of_all = {**LOOPBACK, **(variables() if warm else {}), **(environment or {})}
    return Job(command, environment=variables_of_all)


def run_torchrun(
    script: str | Path,
    *args: str,
    nproc_per_node: int = 2,
    timeout: float = 100.0,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    warm: bool = True,
) -> Finished:
    """Run a script under torchrun to its end."""
    with torchrun(script, *args, nproc_per_node=nproc_per_node, flags=flags, environment=environment, warm=warm) as job:
        return job.wait(timeout)
