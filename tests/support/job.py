"""A program running beside the test: its output is kept, and nothing of it outlives the `with` block."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .patience import patience
from .process_tree import kill_tree


class Finished(NamedTuple):
    """How a program ended: its exit code (negative is a signal), and stdout and stderr together."""

    exit_code: int
    output: str


class Job:
    """A child process with captured output and hard ends.

    Example:
        with Job([sys.executable, "train.py"]) as job:
            job.wait_for_output("step 10")
            job.signal(signal.SIGTERM)
            exit_code, output = job.wait()
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.command = list(command)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to what it has started."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the program and to all that it has started, and wait."""
        if self.running:
            kill_tree(self.pid)
        self._process.wait()

    def wait(self, timeout: float = 120.0) -> Finished:
        try:
            return Finished(self._process.wait(patience(timeout)), self.output)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.command} did not end in {timeout:g} s:\n{self.output}"
            ) from None

    def wait_until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait until a condition of the test holds while the program runs."""
        end = time.monotonic() + patience(timeout)
        while not condition():
            assert self.running or condition(), f"{self.command} ended too early:\n{self.output}"
            assert time.monotonic() < end, (
                f"{self.command}: not seen in {timeout:g} s:\n{self.output}"
            )
            time.sleep(0.01)

    def wait_for_output(self, text: str, timeout: float = 60.0) -> None:
        """Wait until the program has printed `text`."""
        self.wait_until(lambda: text in self.output, timeout)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._output.close()
