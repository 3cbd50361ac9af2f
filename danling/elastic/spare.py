"""A replacement that is kept ready: a process that has imported torch, and waits before the program."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_READY = b"."


class Spare:
    """A process that waits for its rank. Its import of torch takes seconds, which no rank waits for then.

    Args:
        python: The interpreter of the program.
    """

    def __init__(self, python: str) -> None:
        answer, self._theirs = os.pipe()
        os.set_blocking(answer, False)
        self._answer: int | None = answer
        self._is_warm = False
        self.proc = subprocess.Popen(
            [python, "-u", "-m", "danling.elastic.spare", str(self._theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[self._theirs],
            start_new_session=True,
        )
        os.close(self._theirs)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.proc.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        if not self._is_warm and self._answer is not None:
            with suppress(BlockingIOError):
                self._is_warm = os.read(self._answer, 1) == _READY
        return self._is_warm and self.is_alive

    def start(
        self, program: Sequence[str], variables: Mapping[str, str], rank: int
    ) -> Started | None:
        """Have it run a program of Python as the rank of this machine with that number.

        Returns:
            What torch's agent watches; `None` if the spare has ended in the meantime.
        """
        assert self.proc.stdin is not None
        order = {"program": list(program), "variables": dict(variables)}
        try:
            self.proc.stdin.write(json.dumps(order).encode() + b"\n")
            self.proc.stdin.close()
        except BrokenPipeError:
            self.close()
            return None
        self._close_answer()
        return Started(self.proc, rank)

    def close(self) -> None:
        """End it."""
        self._close_answer()
        if self.proc.stdin is not None:
            with suppress(BrokenPipeError):  # what it has not read
                self.proc.stdin.close()
        if self.is_alive:
            self.proc.kill()
        self.proc.wait()

    def _close_answer(self) -> None:
        if self._answer is not None:
            os.close(self._answer)
            self._answer = None


class Started:
    """A spare that has become a rank, as torch's `SubprocessHandler` shows it."""

    def __init__(self, proc: subprocess.Popen[bytes], local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the process and its children a signal."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def wait_and_run(answer: int) -> None:
    """Be a spare: import, wait for the order, run the program."""
    import torch._dynamo  # noqa: F401

    import danling  # noqa: F401

    os.write(answer, _READY)
    os.close(answer)
    # Not by `sys.stdin`, whose buffer would take what belongs to the program.
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    order: dict[str, Any] = json.loads(line)
    os.environ.update(order["variables"])
    run_program(order["program"])


def run_program(words: Sequence[str]) -> None:
    """Run what follows `python` on a command line: options without a value, then a script or `-m module`."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    wait_and_run(int(sys.argv[1]))
