"""Checks whether a user's program resumes bitwise: stops it by SIGTERM, kills it by SIGKILL, resumes it, and compares it with itself.

The same command trains in a scratch directory without a break, and a second time with both interruptions. The digests of each update are
compared.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from danling.prove.program import (
    ProgramEnd,
    announce,
    end_program,
    kill_program,
    scratch_settings,
    start_program,
)

from .digests import read_digests
from .divergence import compare_digests

Found = tuple[str, str, str]
"""Name, state (`ok` or `failed`) and detail of a check."""

# Short, since a small program makes many updates a second, and is to be stopped after a few.
_POLL_SECONDS = 0.01
_BEGINNING = (
    ": two starts of it differ, so nothing can be said of a resume. Set seed, and draw nothing before `super().__init__`; with several "
    "threads keep OMP_NUM_THREADS at one number"
)
_LOST = (
    ": a resume lost something that the next updates need. Plain attributes of model, criterion, optimizer and their parts are not "
    "saved: give the module `get_extra_state` and `set_extra_state`, make it a buffer, or name the object that has it on the runner too"
)
_FAILS = "Fix that first. The program must run again in the same directory, and make one run: have its arguments select one."
_LONGER_SECONDS = 3.0

Leave = Callable[[subprocess.Popen[bytes]], None]
"""How a program is stopped."""


class ScriptFailed(ValueError):
    """The program did not reach the update at which it is stopped."""


class ResumeCheck:
    """Starts a program, stops and kills it, resumes it, and compares."""

    def __init__(
        self, command: Sequence[str], directory: Path, *, updates: int, timeout: float
    ) -> None:
        self.command = command
        self.directory = directory
        self.updates = updates
        self.timeout = timeout
        self._log = directory / "output.log"

    def examine(self) -> Iterator[Found]:
        """Yield each check as it ends; behind the first that failed there is nothing to compare."""
        whole = self.directory / "whole"
        parts = self.directory / "parts"
        updates = self.updates
        begin = time.monotonic()
        announce(
            f"1 of 4: the program trains {4 * updates} updates without a break, within {self.timeout:g} s"
        )
        # Longer than the other: a quick program makes more updates before a signal stops it.
        self._train(whole, 4 * updates, leave=kill_program, seconds=_LONGER_SECONDS)
        reference = read_digests(whole)
        took = time.monotonic() - begin
        done = 0
        last = max(reference)
        if last < 2 * updates + 2:
            # It ended by itself, and would end before it is killed, too.
            raise self._failed(f"{last} updates until its end")
        phases = (
            ("begins alike", "trains and is stopped by SIGTERM", self._stop),
            ("resumes after SIGTERM", "resumes and is killed", kill_program),
            ("resumes after SIGKILL", "resumes from the kill and is ended", kill_program),
        )
        for number, (name, what, leave) in enumerate(phases, 2):
            seconds = (5 - number) * took
            announce(
                f"{number} of 4: it {what} after {updates} updates; about {seconds:.0f} s are left at most"
            )
            before, done = done, self._train(parts, done + updates, leave=leave, resumes=number > 2)
            # What was trained after the last checkpoint is trained again, and compared again.
            divergences = compare_digests(reference, read_digests(parts))
            if divergences:
                fix = _BEGINNING if number == 2 else _LOST
                yield (
                    name,
                    "failed",
                    f"{divergences[0].what} diverged first, at update {divergences[0].step}{fix}",
                )
                return
            compared = (
                f"updates 1 to {done} of two starts",
                f"stopped after update {before}; updates {before + 1} to {min(done, last)} after it",
                f"killed at update {before}; the updates up to {min(done, last)}",
            )
            yield name, "ok", f"{compared[number - 2]} are bitwise the same"
            if number < 4 and done + 2 > last:
                raise self._failed(f"{done} updates until it ended, and {last} without a break")
            if number == 2 and not any((parts / "checkpoints").glob("latest*")):
                raise self._failed("it saved no checkpoint when it was stopped by SIGTERM")

    def _train(
        self, run: Path, updates: int, *, leave: Leave, resumes: bool = False, seconds: float = 0.0
    ) -> int:
        """Train until a run has so many updates and so many seconds have passed since the first; stop it and return how many it has."""
        settings = {**scratch_settings(run), "auto_resume": resumes, "audit.digest_interval": 1}
        process = start_program(self.command, settings, log=self._log)
        begin = time.monotonic()
        first = None
        try:
            while True:
                done = max(read_digests(run), default=0)
                if first is None and done:
                    first = time.monotonic()
                if first is not None and done >= updates and time.monotonic() > first + seconds:
                    leave(process)
                    return max(read_digests(run))
                if process.poll() is not None:
                    # Without a break a program may be at its end; then it is compared as far as it went.
                    if process.returncode == 0 and seconds and done:
                        return done
                    what = f"exit code {process.returncode} after {done} updates"
                    raise self._failed(
                        f"{what}, before it was stopped" if done else f"{what} of a runner"
                    )
                if time.monotonic() > begin + self.timeout:
                    raise self._failed(f"{done} updates in {self.timeout:g} s")
                time.sleep(_POLL_SECONDS)
        finally:
            end_program(process)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise self._failed(f"it did not end in {self.timeout:g} s after SIGTERM") from None

    def _failed(self, received: str) -> ScriptFailed:
        # A program that came to a good end has only too little to do.
        tail = ProgramEnd(None, self._log).tail.strip()
        fails = "exit code" in received and not received.startswith("exit code 0")
        return ScriptFailed(
            f"Expected a program that trains a runner for at least {4 * self.updates} updates, and can be stopped on its way. Received: "
            f"{received}; the end of what it printed:\n{tail}\n{_FAILS if fails else 'Give it more to do, or set --updates.'}"
        )
