"""Starts a user's own program as a child process, with settings imposed on the runs that it makes.

    end = run_program(["python", "train.py", "--lr", "0.1"], {"dir": "scratch/run", "auto_resume": False}, log=Path("scratch/output.log"))
    end.code, end.tail

The program is started as the user would start it: as it is, `torchrun` included, in the present directory and environment. Its
runner reads the settings from the environment when it is constructed, see `danling.config.inputs`; processes that the program
starts inherit them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from danling.config.inputs import VARIABLE

# A traceback of Python, and some lines before it.
_TAIL_BYTES = 8192
# A runner that is sent SIGTERM saves first.
_SECONDS_TO_END = 15.0


def scratch_settings(directory: Path) -> dict[str, object]:
    """Return the settings by which a program trains in its own directory, from scratch, and writes nowhere else."""
    return {
        "dir": os.fspath(directory.absolute()),
        "checkpoint_dir": os.fspath(directory.absolute() / "checkpoints"),
        "log_file": None,
        "auto_resume": False,
        "resume": None,
        "checkpoint.load_only": False,
        "checkpoint.remote.url": None,
        **dict.fromkeys(
            ("wandb.enabled", "mlflow.enabled", "trackio.enabled", "tensorboard"), False
        ),
    }


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    code: int | None
    log: Path

    @property
    def tail(self) -> str:
        """The end of what it printed, on stdout and stderr together."""
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")


def announce(text: str) -> None:
    """Say on stderr what begins: a program may train for minutes, and stdout has the result alone."""
    print(f"danling: {text}", file=sys.stderr, flush=True)


def run_program(
    command: Sequence[str],
    settings: Mapping[str, object],
    *,
    log: Path,
    timeout: float | None = None,
) -> ProgramEnd:
    """Run a program to its end. The processes that it has started are ended with it."""
    process = start_program(command, settings, log=log)
    try:
        return ProgramEnd(process.wait(timeout), log)
    except subprocess.TimeoutExpired:
        return ProgramEnd(None, log)
    finally:
        end_program(process)


def start_program(
    command: Sequence[str],
    settings: Mapping[str, object] | None,
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in its own process group, and return it; see `run_program`. End it with `end_program`.

    Without settings it is started as it is; without a directory, in the present one.
    """
    if not command:
        raise ValueError(
            "Expected a program behind `--`. Received: none. Write it as you start it: -- python train.py."
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    # Without PYTHONUNBUFFERED a program that is killed takes its last lines with it.
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    if settings is not None:
        variables[VARIABLE] = json.dumps(dict(settings))
    with open(log, "wb") as output:
        try:
            return subprocess.Popen(
                list(command),
                # A program that asks for input finds the end of it, and does not wait for ever.
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=directory,
                # So that signals reach all that the program starts, and Ctrl-C in the terminal this
                # program alone.
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise ValueError(
                f"Expected a program that can be started. Received: {command[0]!r} ({error.strerror}). Write it as you start it: "
                "-- python train.py."
            ) from None


def rank_variables(number: int, port: int) -> dict[str, str]:
    """Return the variables that all of so many ranks on this machine have, if no launcher starts them."""
    return {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Without it each rank starts a thread for every core, and all slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or str(max(1, (os.cpu_count() or 1) // number)),
        # Of a launcher that this process may have been started by.
        "TORCHELASTIC_RUN_ID": "",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def end_program(process: subprocess.Popen[bytes]) -> None:
    """End a program and all of its process group, first by SIGTERM; nothing happens where they have ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Also where the program has ended: processes that it left behind are still in its group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)


def kill_program(process: subprocess.Popen[bytes]) -> None:
    """End a program at this instant by SIGKILL, with everything that it has started, also in other sessions (torchrun's workers)."""
    found = [process.pid]
    # All are stopped first, so that none starts another one unseen.
    # The list grows meanwhile, so that children of children are stopped as well.
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
        found += _children_of(pid)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _children_of(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            int(child)
            for each in threads
            for child in Path(f"/proc/{pid}/task/{each}/children").read_text().split()
        ]
    # It has ended, or this system has no /proc: then the process group is all that is known.
    except OSError:
        return []
