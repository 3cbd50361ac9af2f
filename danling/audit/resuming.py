"""Checks whether a user's program resumes bitwise: stops it by SIGTERM, kills it by SIGKILL, resumes it, and compares it with itself.

The same command trains in a scratch directory without a break, and a second time with both interruptions. The digests of each update are
compared.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .digests import DigestLine, read_digests
from .divergence import Divergence, compare_digests
from .program import (
    ProgramEnd,
    announce,
    end_program,
    kill_program,
    scratch_settings,
    start_program,
)

Found = tuple[str, str, str]
"""Name, state (`ok` or `failed`) and detail of a check."""

_POLL_SECONDS = 0.01
_BEGINNING = (
    "two starts of it differ, so nothing can be said of a resume. Set seed, and draw nothing before `super().__init__`; with several "
    "threads keep OMP_NUM_THREADS at one number"
)
_FAILS = "Mend that first. The program must run again in the same directory, and make one run: have its arguments select one."
_LONGER_SECONDS = 3.0

Leave = Callable[[subprocess.Popen[bytes]], None]
"""How a program is stopped."""


class ScriptFailed(ValueError):
    """The program did not reach the update at which it is stopped."""


class ResumeCheck:
    """Starts a program, stops and kills it, resumes it, and compares."""

    def __init__(self, command: Sequence[str], place: Path, *, updates: int, timeout: float) -> None:
        self.command = command
        self.place = place
        self.updates = updates
        self.timeout = timeout
        self._log = place / "output.log"

    def examine(self) -> Iterator[Found]:
        """Yield each check as it ends; behind the first that failed there is nothing to compare."""
        whole, parts, updates = self.place / "whole", self.place / "parts", self.updates
        begin = time.monotonic()
        announce(f"1 of 4: the program trains {4 * updates} updates without a break, within {self.timeout:g} s")
        # Longer than the other: a quick program makes more updates before a signal stops it.
        self._train(whole, 4 * updates, leave=kill_program, seconds=_LONGER_SECONDS)
        reference = read_digests(whole)
        took = time.monotonic() - begin
        announce(
            f"2 of 4: it trains {updates} updates and is stopped by SIGTERM; about {3 * took:.0f} s are left at most"
        )
        stopped = self._train(parts, updates, leave=self._stop)
        self._check_length(reference, stopped)
        divergence = _first(reference, parts, 1, stopped)
        yield _verdict("begins alike", divergence, f"updates 1 to {stopped} of two starts", _BEGINNING)
        if divergence is not None:
            return
        if not any((parts / "checkpoints").glob("latest*")):
            raise self._failed("it saved no checkpoint when it was stopped by SIGTERM")
        announce(
            f"3 of 4: it resumes, and is killed after {updates} updates more; about {2 * took:.0f} s are left at most"
        )
        killed = self._train(parts, stopped + updates, leave=kill_program, resumes=True)
        divergence = _first(reference, parts, stopped + 1, killed)
        detail = f"stopped after update {stopped}; updates {stopped + 1} to {min(killed, max(reference))} after it"
        yield _verdict("resumes after SIGTERM", divergence, detail)
        if divergence is not None:
            return
        self._check_length(reference, killed)
        announce(f"4 of 4: it resumes from the kill, and trains {updates} updates; about {took:.0f} s are left at most")
        end = self._train(parts, killed + updates, leave=kill_program, resumes=True)
        # What was trained after the last checkpoint is trained again, and compared again.
        divergence = _first(reference, parts, 1, end)
        detail = f"killed at update {killed}; the updates up to {min(end, max(reference))}"
        yield _verdict("resumes after SIGKILL", divergence, detail)

    def _train(self, run: Path, updates: int, *, leave: Leave, resumes: bool = False, seconds: float = 0.0) -> int:
        """Train until a run has so many updates and so many seconds have passed since the first; stop it and return how many it has."""
        settings = {**scratch_settings(run), "auto_resume": resumes, "audit.digest_interval": 1}
        process = start_program(self.command, settings, log=self._log)
        begin, first = time.monotonic(), None
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
                    raise self._failed(f"{what}, before it was stopped" if done else f"{what} of a runner")
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

    def _check_length(self, reference: Mapping[int, DigestLine], done: int) -> None:
        if done + 2 > max(reference):
            raise self._failed(f"{done} updates until it ended, and {max(reference)} without a break")

    def _failed(self, received: str) -> ScriptFailed:
        tail = ProgramEnd(None, self._log).tail.strip()
        fails = "exit code" in received and not received.startswith("exit code 0")
        return ScriptFailed(
            f"Expected a program that trains a runner for at least {4 * self.updates} updates, and can be stopped on its way. Received: "
            f"{received}; the end of what it printed:\n{tail}\n{_FAILS if fails else 'Give it more to do, or set --updates.'}"
        )


def _first(reference: Mapping[int, DigestLine], run: Path, begin: int, end: int) -> Divergence | None:
    """Return what diverges first within some updates of two runs."""
    made = {step: line for step, line in read_digests(run).items() if begin <= step <= end}
    if not made.keys() & reference.keys():
        return Divergence("samples", begin, None, (None, None), None)
    found = compare_digests(reference, made)
    return found[0] if found else None


def _verdict(name: str, divergence: Divergence | None, detail: str, mend: str | None = None) -> Found:
    if divergence is None:
        return name, "ok", f"{detail} are bitwise the same"
    mended = f": {mend}" if mend else ""
    return name, "failed", f"{divergence.what} diverged first, at update {divergence.step}{mended}"
