"""`danling prove --resume`: whether a script that is killed continues bitwise as one that is not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .differences import NotChecked
from .inside.tape import Job
from .program import announce
from .starts import Script, reason_of

_ORDER = ("samples", "loss", "gradients", "weights")
_CAUSES = {
    "samples": "the position in the data, or the order of an epoch",
    "loss": "random numbers of the forward, or a buffer",
    "gradients": "random numbers of the forward that do not show in the loss, or gradients that were not saved within a window",
    "weights": "the state of the optimizer, or its schedule",
}

Line = Mapping[str, Any]


@dataclass
class ResumeReport:
    """The result of `danling prove --resume`.

    Attributes:
        verdict: `same`, `different`, or `not checked`.
        processes: Number of processes.
        summary: Why nothing was compared.
        checks: Name, state and detail of each check.
        begins: The update that the resumed script begins with; `None` where no update begins with its weights.
        differs: The first update that differs.
        first: What differs first: samples, loss, gradients or weights.
    """

    processes: int = 0
    verdict: str = "same"
    summary: str | None = None
    checks: list[tuple[str, str, str]] = field(default_factory=list)
    begins: int | None = None
    differs: int | None = None
    first: str | None = None

    def __str__(self) -> str:
        lines = [f"{name:23} {state:7} {detail}" for name, state, detail in self.checks]
        head = [] if self.verdict != "not checked" else [f"not checked: {self.summary}"]
        return "\n".join([*lines, *head])


class ResumeProof:
    """Kills a script, continues it by another command, and compares it with itself undisturbed."""

    def __init__(self, script: Script, resume: Sequence[str], updates: int) -> None:
        self.script, self.updates = script, updates
        self.resumed = replace(script, command=list(resume))
        self.report = ResumeReport()

    def run(self) -> ResumeReport:
        """Start the script three times. A report that says `not checked` has the reason."""
        try:
            with self.script.guarded():
                self._run()
        except Exception as error:
            # An error of the comparison is no verdict on the script.
            self.report.verdict = "not checked"
            self.report.summary = reason_of(error)
        return self.report

    def _run(self) -> None:
        whole = self._start(self.script, "whole", 2 * self.updates, "undisturbed", ends=True)
        made = len(whole[0])
        if made < 3:
            raise NotChecked(
                f"Expected a script that makes several updates. Received: {made} updates of a torch optimizer."
            )
        # So that updates are left to be compared after the resume.
        kill = min(self.updates, 2 * made // 3)
        work = self.script.copied("work")
        killed = self._start(
            self.script, "killed", kill, f"up to a SIGKILL after update {kill}", directory=work
        )
        self._have_same_ranks(whole, killed, self.script)
        self._begins_alike(whole, killed, kill)
        resumed = self._start(self.resumed, "resumed", made, "resumed", directory=work, ends=True)
        self._have_same_ranks(whole, resumed, self.resumed)
        self._resumes(whole, resumed, kill)

    def _start(
        self,
        script: Script,
        name: str,
        updates: int,
        where: str,
        *,
        directory: Path | None = None,
        ends: bool = False,
    ) -> list[list[Line]]:
        announce(f"the script makes up to {updates} updates {where}, within {script.timeout:g} s")
        job = Job(directory="", updates=updates, mode="resume")
        self.report.processes = script.start(name, job, alone=False, directory=directory, ends=ends)
        records = script.scratch / name
        found = []
        for rank in range(self.report.processes):
            file = records / f"rank-{rank}.jsonl"
            found.append(
                [json.loads(line) for line in file.read_text().splitlines()]
                if file.exists()
                else []
            )
        if not found or not all(found):
            raise NotChecked(
                f"no update of a torch optimizer was seen where the script was {where.partition(' ')[0]}"
            )
        return found

    def _have_same_ranks(
        self, whole: Sequence[object], other: Sequence[object], script: Script
    ) -> None:
        if len(whole) != len(other):
            raise NotChecked(
                f"Expected a command that starts {len(whole)} processes, as the undisturbed script has. Received: "
                f"{shlex.join(script.command)!r}, which starts {len(other)}."
            )

    def _begins_alike(
        self, whole: Sequence[Sequence[Line]], killed: Sequence[Sequence[Line]], kill: int
    ) -> None:
        for rank, (one, two) in enumerate(zip(whole, killed)):
            for number, (a, b) in enumerate(zip(one, two), 1):
                others = _differing(a, b)
                if others:
                    detail = f"update {number} of rank {rank} differs first in {others[0]}"
                    self.report.checks.append(("begins alike", "FAILED", detail))
                    raise NotChecked(
                        f"two starts of the script are not bitwise the same ({detail}), so that a resume cannot be compared. Set all "
                        "seeds, and write outputs and checkpoints below the working directory, which each start has a copy of"
                    )
        detail = f"updates 1 to {kill} of two starts are bitwise the same"
        self.report.checks.append(("begins alike", "ok", detail))

    def _resumes(
        self, whole: Sequence[Sequence[Line]], resumed: Sequence[Sequence[Line]], kill: int
    ) -> None:
        report = self.report
        worst: tuple[int, int | None, int, list[str]] | None = None
        for rank, (one, two) in enumerate(zip(whole, resumed)):
            begins, number, others = _compared(one, two, kill)
            if begins is None:
                # Nothing is worse than weights that no update had: other ranks need no look.
                worst = (rank, None, 0, [])
                break
            if begins == 1:
                raise NotChecked(
                    f"the resumed script begins with update 1: it finds no checkpoint of the first {kill} updates. Have the script write "
                    "one before, or give --updates; it has to be below the working directory"
                )
            report.begins = begins
            # Gradients are reduced: where the loss of one rank differs, those of all ranks do in the same update.
            if others and (
                worst is None
                or (number, _ORDER.index(others[0])) < (worst[2], _ORDER.index(worst[3][0]))
            ):
                worst = (rank, begins, number, others)
            compared = min(len(two), len(one) - begins + 1)
        name = "resumes after SIGKILL"
        if worst is None:
            detail = f"begins at update {report.begins}; {compared} updates are bitwise the same"
            report.checks.append((name, "ok", detail))
            return
        rank, begins, number, others = worst
        where = f" on rank {rank}" if report.processes > 1 else ""
        report.verdict = "different"
        report.differs = number or None
        if begins is None:
            detail = f"begins with weights that the undisturbed script never had{where}"
        else:
            report.first = others[0]
            more = f" (then {', '.join(others[1:])})" if len(others) > 1 else ""
            verb = "differs" if others[0] == "loss" else "differ"
            detail = f"begins at update {begins}; {others[0]} {verb} first, at update {number}{where}{more}: {_CAUSES[others[0]]}"
        report.checks.append((name, "FAILED", detail))


def _differing(one: Line, two: Line) -> list[str]:
    # The tape has weights under two names, `before` and `after` the update.
    names = {"weights": "after"}
    return [what for what in _ORDER if one[names.get(what, what)] != two[names.get(what, what)]]


def _compared(
    one: Sequence[Line], two: Sequence[Line], kill: int
) -> tuple[int | None, int, list[str]]:
    """Return the update that a resumed script begins with, the first one that differs, and in what."""
    best: tuple[int | None, int, list[str]] = (None, 0, [])
    # Weights that do not change, as with a learning rate of 0, are those before several updates.
    matches = [at for at, line in enumerate(one[: kill + 1]) if line["before"] == two[0]["before"]]
    # The latest one first: a resume that is in order begins with the newest checkpoint.
    for at in reversed(matches):
        pairs = enumerate(zip(one[at:], two), at + 1)
        number, others = next(((n, d) for n, (a, b) in pairs if (d := _differing(a, b))), (0, []))
        if not others:
            return at + 1, 0, []
        # Where all of them differ, the beginning that agrees longest is the likeliest.
        if best[0] is None or number - at > best[1] - best[0]:
            best = (at + 1, number, others)
    return best
