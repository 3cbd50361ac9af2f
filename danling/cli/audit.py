"""Train a stretch of a run again, and say whether its end is bitwise the stored one; if not, at which update what diverged first.

The program is started as it is, with DANLING_SETTINGS in its environment, which has it begin from the checkpoint at FROM and train in a
scratch directory to the update TO. Nothing is written into the run. No code is taken from a checkpoint.

Ends with 0 if the end is bitwise the stored one and all figures on the way are, with 1 if not, with 2 if the program failed before
it came there. With --tolerance it ends with 0 if nothing differs by more than this share, as on another number of processes.

Example: danling audit experiments/lin/run:1000..2000 -- torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .output import DAMAGED, OK, add_json, at_least, print_json

if TYPE_CHECKING:
    from danling.audit.rerun import AuditResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "stretch",
        metavar="RUN[:FROM..TO]",
        help="a run directory; updates at which it has checkpoints, by default the last two; FROM 0: scratch",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="directory to train in, which is kept (default: one that is removed)",
    )
    parser.add_argument(
        "--timeout", type=at_least(0, float), help="seconds that the program may take"
    )
    parser.add_argument(
        "--tolerance",
        type=at_least(0, float),
        help="accept differences of at most this share of the stored value: of losses, metrics, and the norm of each tensor",
    )
    add_json(parser)
    parser.epilog = "After `--` comes the program that trained the run, as you start it."


def run(options: argparse.Namespace) -> int:
    """Train again and compare."""
    from danling.audit.rerun import audit_run  # torch

    run, start, end = stretch(options.stretch)
    with tempfile.TemporaryDirectory(prefix="danling-audit-") as temporary:
        scratch = options.scratch or Path(temporary)
        found = audit_run(
            run, options.program, scratch=scratch, start=start, end=end, timeout=options.timeout
        )
    beyond = found.beyond(options.tolerance or 0.0)
    is_accepted = found.is_same or (options.tolerance is not None and not beyond)
    if options.json:
        print_json(
            {
                "from": 0 if found.start is None else found.start.step,
                "to": found.end.step,
                "same": found.is_same,
                "accepted": is_accepted,
                "failed": found.failed,
                "ranks": found.ranks,
                "differing": found.differing,
                "shares": {each.path: each.share for each in found.differences}
                | dict(found.comparison.shares),
                "divergences": [
                    {**asdict(each), "what": each.what} for each in found.comparison.divergences
                ],
                "environment": found.comparison.environment,
                "settings": found.comparison.settings,
            }
        )
        return OK if is_accepted else DAMAGED
    _show(found)
    if options.tolerance is not None and not found.is_same:
        verdict = "Accepted" if is_accepted else "Not accepted"
        larger = f": {_some(beyond)}" if beyond else ""
        print(f"{verdict} with a tolerance of {options.tolerance:g}{larger}.")
    if found.failed is not None:
        last = found.failed.strip().rpartition("\n")[2]
        print(
            f"The program failed after this stretch, which is not compared: {last} A checkpoint that the stretch does not make may be "
            "missing there; --scratch keeps what it printed."
        )
    return OK if is_accepted else DAMAGED


def _show(found: AuditResult) -> None:
    """Print whether the stretch is the same; if not, what differs and by how much."""
    from .diff import show_divergences, show_environment

    first = 1 if found.start is None else found.start.step + 1
    same = "bitwise the same" if found.is_same else "not the same"
    print(f"updates {first} to {found.end.step}: {same} as {found.end.path}")
    if found.is_same:
        return
    names = ("stored", "trained again")
    if found.differing:
        print(f"{len(found.differing)} entries of the checkpoints differ: {_some(found.differing)}")
    show_divergences(found.comparison.divergences, names=names)
    print()
    show_environment(found.comparison, names=names)
    entries = {each.path: each.share for each in found.differences if each.share is not None}
    for what, of, shares in (
        ("entries", "norm", entries),
        ("figures", "value", found.comparison.shares),
    ):
        if shares:
            name = max(shares, key=lambda name: shares[name])
            print(
                f"{len(shares)} {what} differ by at most {shares[name]:.1e} of their {of} ({name})"
            )
    before, now = found.ranks
    if before != now:
        print(
            f"Processes: {before} stored, {now} here. They add up samples in another order, so that the end is not promised to be bitwise "
            "the same; see --tolerance."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def stretch(text: str) -> tuple[Path, int | None, int | None]:
    """Return the run and the updates that `RUN[:FROM..TO]` names; `None` for one that is left out."""
    run, colon, updates = text.rpartition(":")
    # A directory may have a colon in its name, as one that is named after a time.
    if not colon or Path(text).is_dir():
        return Path(text), None, None
    start, dots, end = updates.partition("..")
    if not dots or not all(part.isdigit() or not part for part in (start, end)):
        raise ValueError(
            f"Expected RUN:FROM..TO, such as run:1000..2000. Received: {text!r}. Write two updates, or leave one out."
        )
    return Path(run), int(start) if start else None, int(end) if end else None
