"""Plants each fault of the past in turn, and counts the programs until the search finds it.

    PYTHONPATH=.:tests python -m explore.planted_search --budget 1200 --jobs 2 --seed 5

Every fault gets the same programs in the same order, each of which is right without a fault, until one fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from support.preloading import preload

from .planted import PLANTED
from .planted_blind import PLANTED as PLANTED_BLIND
from .planted_form import VARIABLE, Planted
from .properties import Verdict, checked
from .search import STACKS_EVERY
from .spec import Program
from .strategies import programs

FAULTS: dict[str, Planted] = {fault.name: fault for fault in (*PLANTED, *PLANTED_BLIND)}
FAILS = ("differs", "died")


def drawn(number: int) -> Iterator[Program]:
    """Yield programs as the search draws them, each once."""
    seen: set[str] = set()
    for group in itertools.count(1000 * number):
        for program in drawn_together(group):
            text = program.to_json()
            if text not in seen:
                seen.add(text)
                yield program


def drawn_together(group: int) -> list[Program]:
    """Return a few programs; as in the search few at a time, since hypothesis begins with small ones."""
    found: list[Program] = []
    strategy = programs(group % STACKS_EVERY == STACKS_EVERY - 1)

    @seed(group)
    @settings(
        max_examples=9,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


def work(pipe: connection.Connection) -> None:
    """Check programs, each with the fault that comes with it, until there is none."""
    from support.processes import fork_server

    fork_server()
    while (task := pipe.recv()) is not None:
        fault, program = task
        pipe.send(checked_with(fault, program))


def checked_with(fault: str, program: Program) -> Verdict:
    """Check a program with a fault; it is found if the program fails with the fault twice, and not without."""
    os.environ[VARIABLE] = fault
    verdict = checked(program)
    if not fault or verdict.kind not in FAILS:
        return verdict
    again = checked(program)
    os.environ[VARIABLE] = ""
    without = checked(program)
    is_found = again.kind in FAILS and again.broken == verdict.broken and without.kind not in FAILS
    return verdict if is_found else Verdict("right", f"once only: {verdict.text}")


@dataclass
class Search:
    """The state of the search for all faults together."""

    number: int
    faults: list[str]
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    programs: list[Program] = field(default_factory=list)
    found: dict[str, tuple[int, int, Verdict]] = field(default_factory=dict)
    """By fault: the number of the program, how many were checked with the fault, and what came of it."""
    tried: dict[str, int] = field(default_factory=dict)
    right: int = 0
    checks: int = 0

    def __post_init__(self) -> None:
        self._drawn = drawn(self.number)

    def next_task(self) -> tuple[str, int]:
        """Return the next fault, or none, and the number of the program to check with it."""
        while self.waiting:
            fault, number = self.waiting.popleft()
            if fault not in self.found:
                return fault, number
        self.programs.append(next(self._drawn))
        return "", len(self.programs) - 1

    def take(self, fault: str, number: int, verdict: Verdict) -> None:
        """Take the verdict of a program."""
        self.checks += 1
        if not fault:
            if verdict.kind in ("right", "named"):
                self.right += 1
                self.waiting.extend((each, number) for each in self.faults)
            elif verdict.kind != "refused":
                print(f"without a fault: {verdict.broken}: {verdict.text[:300]}\n  {self.programs[number].to_json()}")
            return
        self.tried[fault] = self.tried.get(fault, 0) + 1
        if verdict.kind in FAILS and fault not in self.found:
            self.found[fault] = number, self.tried[fault], verdict
            print(f"{fault}: found by {verdict.broken} with program {number + 1}", flush=True)
            print(f"  {verdict.text.splitlines()[0][:200]}\n  {self.programs[number].to_json()}", flush=True)

    def report(self, seconds: float) -> str:
        """Return the table."""
        lines = ["| fault | point | programs | found by |", "|---|---|---|---|"]
        for name in self.faults:
            found = self.found.get(name)
            figures = f"{found[1]} | {found[2].broken}" if found else f"not in {self.tried.get(name, 0)} |"
            lines.append(f"| {name} | {FAULTS[name].point} | {figures} |")
        drawn = f"{len(self.programs)} programs drawn, {self.right} right without a fault, {self.checks} checks"
        return "\n".join([*lines, "", f"{len(self.found)} of {len(self.faults)} found in {seconds:.0f} s: {drawn}."])


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(prog="python -m explore.planted_search", description=__doc__)
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="names of faults")
    parser.add_argument("--json", help="file for the table as data")
    options = parser.parse_args()
    preload()
    search, context, begun = Search(options.seed, options.only), multiprocessing.get_context("fork"), time.monotonic()
    workers: dict[Any, Any] = {}
    for _ in range(options.jobs):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,))
        process.start()
        workers[ours] = process
    busy: dict[Any, tuple[str, int]] = {}
    try:
        while len(search.found) < len(search.faults) and time.monotonic() - begun < options.budget:
            for pipe in workers.keys() - busy.keys():
                busy[pipe] = search.next_task()
                pipe.send((busy[pipe][0], search.programs[busy[pipe][1]]))
            ready: Any
            for ready in connection.wait(list(busy), timeout=1.0):
                search.take(*busy.pop(ready), ready.recv())
    finally:
        for process in workers.values():
            process.kill()
            process.join()
    print(search.report(time.monotonic() - begun))
    if options.json:
        rows = {
            name: {"programs": tried, "property": verdict.broken, "program": search.programs[number].to_json()}
            for name, (number, tried, verdict) in search.found.items()
        }
        with open(options.json, "w") as file:
            json.dump({"found": rows, "tried": search.tried}, file, indent=1)


if __name__ == "__main__":
    main()
