"""Plants each fault of the past in turn, and counts the programs until the search finds it.

    PYTHONPATH=.:tests python -m explore.planted_search --budget 1200 --jobs 2 --seed 5

Each program is checked once without a fault, which also notes the switches that it reaches: with the fault of another switch the program
would be the same. It is then checked with the faults that it reaches. Every second check is of a new program, and the others are of the
fault that has been tried least.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from support.preloading import preload

from .planted_form import REACHED, VARIABLE, faults
from .properties import Verdict, checked
from .running import directory, processor_seconds
from .search import STACKS_EVERY
from .spec import Program
from .strategies import programs

FAULTS = faults()
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
    """Check programs, each with the fault that comes with it, until none comes.

    Sends the verdict, without a fault what the program reaches, and how many seconds of the processor were used so far.
    """
    from support.processes import fork_server

    fork_server()
    while (task := pipe.recv()) is not None:
        fault, program = task
        outcome = (checked_with(fault, program), []) if fault else checked_without(program)
        pipe.send((*outcome, processor_seconds()))


def checked_without(program: Program) -> tuple[Verdict, list[str]]:
    """Check a program without a fault, and return also the faults whose switches it reaches."""
    with directory() as place:
        reached = place / "reached"
        os.environ[REACHED] = str(reached)
        try:
            verdict = checked(program)
        finally:
            del os.environ[REACHED]
        names = set(reached.read_text().split()) if reached.exists() else set()
    return verdict, [name for name in FAULTS if name in names]


def checked_with(fault: str, program: Program) -> Verdict:
    """Check a program with a fault; it is found if the program fails with the fault twice, and not without."""
    os.environ[VARIABLE] = fault
    try:
        verdict = checked(program)
        if verdict.kind not in FAILS:
            return verdict
        again = checked(program)
    finally:
        del os.environ[VARIABLE]
    without = checked(program)
    is_found = again.kind in FAILS and again.broken == verdict.broken and without.kind not in FAILS
    return verdict if is_found else Verdict("right", f"once only: {verdict.text}")


@dataclass(frozen=True)
class Finding:
    """How a fault was found.

    Attributes:
        number: The number of the program, from 0.
        tried: How many programs that reach the fault were checked with it.
        verdict: What came of it.
    """

    number: int
    tried: int
    verdict: Verdict


@dataclass
class Search:
    """The state of the search for all faults together."""

    number: int
    faults: list[str]
    programs: list[Program] = field(default_factory=list)
    waiting: dict[str, collections.deque[int]] = field(default_factory=dict)
    """By fault: the programs that reach it and are still to be checked with it."""
    found: dict[str, Finding] = field(default_factory=dict)
    tried: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    """What became of the programs without a fault."""
    checks: int = 0
    used: collections.Counter[Any] = field(default_factory=collections.Counter)
    """Seconds of the processor by worker."""

    def __post_init__(self) -> None:
        self._drawn = drawn(self.number)
        self.waiting = {fault: collections.deque() for fault in self.faults}

    def next_task(self) -> tuple[str, int]:
        """Return the next fault, or none, and the number of the program to check with it."""
        self.checks += 1
        waiting = [fault for fault in self.faults if self.waiting[fault]]
        if waiting and self.checks % 2:
            fault = min(waiting, key=lambda name: self.tried[name])
            self.tried[fault] += 1
            return fault, self.waiting[fault].popleft()
        self.programs.append(next(self._drawn))
        return "", len(self.programs) - 1

    def take(self, fault: str, number: int, verdict: Verdict, reached: list[str]) -> None:
        """Take the verdict of a program, and without a fault the faults that it reaches."""
        if not fault:
            self.kinds[verdict.kind] += 1
            if verdict.kind in FAILS:
                print(
                    f"without a fault: {verdict.broken}: {verdict.text[:300]}\n  {self.programs[number].to_json()}"
                )
                return
            for name in self.waiting.keys() & set(reached) - self.found.keys():
                self.waiting[name].append(number)
        elif verdict.kind in FAILS and fault not in self.found:
            self.waiting[fault].clear()
            self.found[fault] = Finding(number, self.tried[fault], verdict)
            after = f"program {number + 1}, after {self.used.total():.0f} s of the processor"
            print(f"{fault}: found by {verdict.broken} with {after}", flush=True)
            print(
                f"  {verdict.text.splitlines()[0][:200]}\n  {self.programs[number].to_json()}",
                flush=True,
            )

    def report(self, seconds: float) -> str:
        """Return the table."""
        lines = ["| fault | point | drawn | reach it | found by |", "|---|---|---|---|---|"]
        for name in self.faults:
            found = self.found.get(name)
            figures = f"not in {len(self.programs)} | {self.tried[name]} |"
            if found is not None:
                figures = f"{found.number + 1} | {found.tried} | {found.verdict.broken}"
            lines.append(f"| {name} | {FAULTS[name].point} | {figures} |")
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        counts = (
            f"{len(self.programs)} programs drawn ({kinds} without a fault), {self.checks} checks, "
        )
        counts += f"{self.used.total():.0f} s of the processor"
        return "\n".join(
            [
                *lines,
                "",
                f"{len(self.found)} of {len(self.faults)} found in {seconds:.0f} s: {counts}.",
            ]
        )


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(prog="python -m explore.planted_search", description=__doc__)
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds")
    parser.add_argument(
        "--processor",
        type=float,
        default=math.inf,
        help="seconds of the processor: on a busy machine, 2400 are 20 minutes of two cores",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="names of faults")
    parser.add_argument("--json", help="file for the table as data")
    options = parser.parse_args()
    preload()
    search, context, begun = (
        Search(options.seed, options.only),
        multiprocessing.get_context("fork"),
        time.monotonic(),
    )
    workers: dict[Any, Any] = {}
    for _ in range(options.jobs):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,))
        process.start()
        workers[ours] = process
    busy: dict[Any, tuple[str, int]] = {}
    try:
        while len(search.found) < len(search.faults) and time.monotonic() - begun < options.budget:
            if search.used.total() >= options.processor:
                break
            for pipe in workers.keys() - busy.keys():
                busy[pipe] = search.next_task()
                pipe.send((busy[pipe][0], search.programs[busy[pipe][1]]))
            ready: Any
            for ready in connection.wait(list(busy), timeout=1.0):
                verdict, reached, search.used[ready] = ready.recv()
                search.take(*busy.pop(ready), verdict, reached)
    finally:
        for process in workers.values():
            process.kill()
            process.join()
    print(search.report(time.monotonic() - begun))
    if options.json:
        rows = {
            name: {
                "drawn": found.number + 1,
                "reach": found.tried,
                "property": found.verdict.broken,
                "program": search.programs[found.number].to_json(),
            }
            for name, found in search.found.items()
        }
        with open(options.json, "w") as file:
            json.dump({"found": rows, "tried": search.tried}, file, indent=1)


if __name__ == "__main__":
    main()
