"""Asks for each published fault whether `danling prove` finds it, and whether the curve of the loss shows it.

python -m benchmarks.silent                     # all, in about a quarter of an hour on two cores
python -m benchmarks.silent --only 3 14         # some
python -m benchmarks.silent --right             # further right scripts, of several stacks: none may be accused
python -m benchmarks.silent --table table.md    # writes the table, too

A loss curve shows a fault if the mean of its first or last ten losses is more than four standard deviations from those of the right twin at
other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ranks import run_ranks

HERE = Path(__file__).parent
SEEDS, COMPARED, KILLED = 6, 10, 14
RESUMES = (7, 8, 14)
"""Faults that only a resumed run has."""
NOTICED = (9, 13, 15)
"""Faults that one process has, too: a notice is all that can be said."""
NOT_COVERED = (12,)
"""Faults outside of training."""


@dataclass
class Proof:
    """What `danling prove` says of a program."""

    verdict: str
    summary: str
    notes: list[str]
    seconds: float


@dataclass
class Row:
    """What was found out about one fault."""

    number: int
    title: str
    source: str
    wrong: Proof
    right: Proof
    distance: float

    @property
    def found(self) -> str:
        """How `prove` sees it."""
        if self.wrong.verdict == "different":
            return "found"
        return "noticed" if set(self.wrong.notes) - set(self.right.notes) else "no"

    @property
    def as_expected(self) -> bool:
        """Whether it is found as it should be, and its twin is not accused."""
        wanted = (
            "noticed" if self.number in NOTICED else "no" if self.number in NOT_COVERED else "found"
        )
        return self.found == wanted and self.right.verdict != "different"

    def line(self) -> str:
        """Return the row of the table."""
        seen = self.wrong.summary or next(
            iter(sorted(set(self.wrong.notes) - set(self.right.notes))), ""
        )
        curve = "yes" if self.distance > 4 else "no"
        twin = {"same": "passes", "different": "**accused**"}.get(
            self.right.verdict, self.right.verdict
        )
        seconds = f"{self.wrong.seconds:.0f} + {self.right.seconds:.0f}"
        cells = (
            str(self.number),
            self.title,
            self.source,
            f"{self.found}: {seen}" if seen else self.found,
        )
        return " | ".join(("", *cells, twin, f"{curve} ({self.distance:.1f})", seconds, "")).strip()


HEAD = """| | fault | source | `danling prove` | right twin | loss curve (standard deviations) | seconds |
|---|---|---|---|---|---|---|"""


def cases(chosen: Sequence[int]) -> dict[int, Path]:
    """Return the programs by number."""
    found = {int(path.name[4:6]): path for path in sorted((HERE / "cases").glob("case*.py"))}
    return {number: path for number, path in found.items() if not chosen or number in chosen}


def prove(script: Path, *arguments: str, resumes: bool = False, ranks: int = 2) -> Proof:
    """Run `danling prove` on a script, in an empty directory."""
    # Without torchrun, which is a further process that imports torch at each start.
    command = [sys.executable, str(script), *arguments]
    options = ["--ranks", str(ranks)]
    if resumes:
        options += ["--resume", shlex.join([*command, "--resume"])]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        ended = subprocess.run(
            [sys.executable, "-m", "danling", "prove", "--json", *options, "--", *command],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    seconds = time.monotonic() - began
    try:
        report: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        return Proof("not checked", ended.stderr.strip()[-300:], [], seconds)
    summary = report["summary"] or next(
        (detail for _, state, detail in report.get("checks", []) if state == "FAILED"), ""
    )
    return Proof(report["verdict"], summary.partition("\n")[0], report.get("notes", []), seconds)


def losses(script: Path, *arguments: str, seed: int, resumes: bool) -> tuple[float, float]:
    """Return the means of the first and the last losses of a run, which is killed and resumed on the way if that is asked for."""
    os.environ["SEED"] = str(seed)
    printed = []
    with tempfile.TemporaryDirectory() as directory:
        if resumes:
            printed += run_ranks(script, arguments, Path(directory), lines=KILLED)
            arguments = (*arguments, "--resume")
        printed += run_ranks(script, arguments, Path(directory))
    found = [float(line.split()[1]) for line in printed if line.startswith("loss")]
    return statistics.fmean(found[:COMPARED]), statistics.fmean(found[-COMPARED:])


def distance(script: Path, resumes: bool) -> float:
    """Return by how many standard deviations of the right twin the curve of the loss is another one, at its beginning or its end."""
    right = [losses(script, "--right", seed=seed, resumes=False) for seed in range(1, SEEDS + 1)]
    wrong = losses(script, seed=0, resumes=resumes)
    distances = [
        abs(own - statistics.fmean(of)) / statistics.stdev(of)
        for own, of in zip(wrong, zip(*right))
    ]
    return float(max(distances))


def examine(number: int, script: Path) -> Row:
    """Return what is found out about a fault."""
    text, resumes = script.read_text(), number in RESUMES
    source = re.search(r"^Source: (.*)$", text, re.MULTILINE)
    title = text.partition("\n")[0].strip('"').rstrip(".")
    wrong, right = prove(script, resumes=resumes), prove(script, "--right", resumes=resumes)
    return Row(number, title, source[1] if source else "", wrong, right, distance(script, resumes))


RIGHT: list[tuple[str, int, list[str]]] = [
    ("ddp", 2, []),
    ("ddp", 4, ["--accumulate", "3"]),
    ("ddp", 2, ["--accumulate", "3", "--bf16"]),
    ("ddp", 1, ["--accumulate", "3"]),
    ("own_reduction", 2, ["--accumulate", "3"]),
    ("own_reduction", 4, ["--bf16"]),
    ("ddp", 2, ["--constant"]),
    ("ddp", 2, ["--constant", "--bf16"]),
    ("adversarial", 2, []),
    ("checkpointed", 2, ["--accumulate", "3"]),
    ("fsdp1", 2, []),
    ("fsdp1", 4, ["--bf16"]),
    ("fsdp2", 2, ["--accumulate", "3"]),
    ("fsdp2", 4, []),
    ("fsdp2", 2, ["--bf16"]),
    ("hf_trainer", 2, []),
    ("hf_trainer", 2, ["--accumulate", "3"]),
    ("hf_trainer", 2, ["--bf16"]),
    ("accelerated", 2, ["--accumulate", "3"]),
    ("accelerated", 4, ["--bf16"]),
    ("accelerated_dispatch", 2, []),
    ("zero", 2, ["--stage", "0"]),
    ("zero", 2, ["--stage", "2", "--accumulate", "3"]),
    ("zero", 2, ["--stage", "3", "--bf16"]),
    ("lightning", 2, []),
    ("lightning", 2, ["--accumulate", "3", "--bf16"]),
]
"""Right scripts: name, processes and options."""


def examine_right(chosen: Sequence[int]) -> bool:
    """Prove the right scripts; return whether none was accused."""
    accused = 0
    print("| script | processes | verdict | seconds |\n|---|---|---|---|", flush=True)
    for number, (name, ranks, options) in enumerate(RIGHT, 1):
        if chosen and number not in chosen:
            continue
        proof = prove(HERE / "right" / f"{name}.py", *options, ranks=ranks)
        accused += proof.verdict == "different"
        said = f"{proof.verdict}: {proof.summary}" if proof.summary else proof.verdict
        print(
            f"| {number} {' '.join([name, *options])} | {ranks} | {said} | {proof.seconds:.0f} |",
            flush=True,
        )
    print(f"\n{accused} accused")
    return accused == 0


def main() -> int:
    """Examine the faults, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=int, nargs="*", default=[], help="numbers of faults, or of right scripts"
    )
    parser.add_argument(
        "--right", action="store_true", help="prove the further right scripts instead"
    )
    parser.add_argument("--table", type=Path, help="file to write the table to")
    options = parser.parse_args()
    if options.right:
        return 0 if examine_right(options.only) else 1
    rows = []
    print(HEAD, flush=True)
    for number, script in cases(options.only).items():
        rows.append(examine(number, script))
        print(rows[-1].line(), flush=True)
    if options.table:
        options.table.write_text("\n".join([HEAD, *(row.line() for row in rows)]) + "\n")
    others = [row.number for row in rows if not row.as_expected]
    print(f"\nnot as expected: {others}" if others else "\nall as expected")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
