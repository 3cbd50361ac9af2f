"""Run a script as a program in forked processes that have torch loaded: where starting Python is not what a test is about.

from support.programs import run_program

exit_code, output = run_program("examples/digits.py", "--epochs", "1")                      # as `python examples/digits.py`
exit_code, output = run_program("examples/digits.py", "--epochs", "1", nproc_per_node=2)    # as torchrun starts its workers
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from .job import Finished
from .processes import run_processes

_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_program(
    script: str | Path,
    *args: str,
    nproc_per_node: int = 1,
    timeout: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a script to its end, in the working directory of the test."""
    with tempfile.NamedTemporaryFile() as output:
        codes = run_processes(
            _run,
            str(script),
            list(args),
            output.name,
            world_size=nproc_per_node,
            timeout=timeout,
            environment=environment,
        )
        return Finished(max(codes), Path(output.name).read_text(errors="replace"))


def numbers_in(output: str, pattern: str) -> list[float]:
    """Return what the groups of a pattern match in an output, as numbers."""
    found = re.search(pattern, output)
    assert found is not None, output
    return [float(group) for group in found.groups()]


def number_in(output: str, pattern: str) -> float:
    """Return what the one group of a pattern matches in an output, as a number."""
    (number,) = numbers_in(output, pattern)
    return number


def _run(script: str, args: list[str], output: str) -> int:
    """In the process: do what `python script args` does, with the output kept in a file."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if os.environ["WORLD_SIZE"] == "1":
        for name in _OF_A_LAUNCHER:
            del os.environ[name]
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = _code_of(script)
    # A forked process leaves out what a program does last.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _code_of(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0
