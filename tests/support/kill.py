"""Start a Python script and end it by SIGKILL at a chosen moment.

from support.kill import kill_when, python

with python("train.py", "--steps", "100") as job:
    kill_when(job, lambda: latest.exists(), then=0.05)     # 50 ms after the first checkpoint appears
exit_code, output = run_python("train.py", "--steps", "100", "--auto_resume", "true")
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .job import Finished, Job
from .warm import interpreter


def python(script: str | Path, *args: str, environment: Mapping[str, str] | None = None, warm: bool = False) -> Job:
    """Start a Python script, single-threaded, in the working directory of the test."""
    command = interpreter() if warm else sys.executable
    return Job([command, str(script), *args], environment={"OMP_NUM_THREADS": "1", **(environment or {})})


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


def kill_when(job: Job, condition: Callable[[], bool], *, then: float = 0.0, timeout: float = 60.0) -> Finished:
    """Send SIGKILL to a job and its children `then` seconds after `condition` holds."""
    job.wait_until(condition, timeout)
    time.sleep(then)
    job.kill()
    return job.wait()


def kill_after(job: Job, seconds: float) -> Finished:
    """Send SIGKILL to a job and its children after `seconds`, if it still runs then."""
    end = time.monotonic() + seconds
    while job.running and time.monotonic() < end:
        time.sleep(min(0.01, max(end - time.monotonic(), 0)))
    job.kill()
    return job.wait()
