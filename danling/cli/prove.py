"""Check whether a training script of any library computes the same on several processes as on one, and after a kill.

The script runs unchanged: its processes are recorded from within. It makes its first updates on several processes, and then in one with the
same samples and weights; losses, gradients before clipping and weights are compared. Dropout is off.
With --resume CMD it is killed, and CMD has to continue it bitwise: samples, random numbers, weights and schedule.

Ends with 0 if all is the same but for rounding, with 1 if not, with 2 if it could not be checked.

Examples: danling prove -- torchrun --nproc-per-node 2 train.py --lr 0.1
          danling prove --ranks 2 -- python train.py
          danling prove --resume 'python train.py --resume_from_checkpoint last' -- python train.py
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .output import DAMAGED, OK, WRONG_USAGE, add_check_options, at_least, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--ranks", type=at_least(1), help="processes to start, where the program starts none itself"
    )
    parser.add_argument(
        "--one",
        metavar="CMD",
        help="command for one process (default: that of the launcher, with one process)",
    )
    parser.add_argument(
        "--resume", metavar="CMD", help="command that continues the program after it was killed"
    )
    parser.add_argument(
        "--updates",
        type=at_least(1),
        help="updates to compare (default: 2); with --resume, those before the kill (default: 20)",
    )
    parser.add_argument("--keep-dropout", action="store_true", help="leave dropout as it is")
    add_check_options(parser, rounding="1e-5, or what is measured")
    parser.epilog = "After `--` comes the program, as you start it."


def run(options: argparse.Namespace) -> int:
    """Check and print."""
    from danling.prove.check import LayoutProof  # torch
    from danling.prove.comparison import Report
    from danling.prove.inside.tape import Job
    from danling.prove.resume import ResumeProof, ResumeReport
    from danling.prove.starts import Script, private_directory

    with tempfile.TemporaryDirectory(prefix="danling-prove-") as temporary:
        scratch = private_directory((options.scratch or Path(temporary)).absolute())
        script = Script(
            command=options.program,
            scratch=scratch,
            one=_one(options),
            ranks=options.ranks,
            timeout=options.timeout,
        )
        if options.resume is not None:
            report: Report | ResumeReport = ResumeProof(
                script, shlex.split(options.resume), options.updates or 20
            ).run()
        else:
            job = Job(
                directory="", updates=options.updates or 2, keeps_dropout=options.keep_dropout
            )
            report = LayoutProof(script, job, options.tolerance).run()
    if options.json:
        print_json(asdict(report))
    else:
        print(report)
    # Any other verdict says that it could not be checked.
    return {"same": OK, "different": DAMAGED}.get(report.verdict, WRONG_USAGE)


def _one(options: argparse.Namespace) -> Sequence[str]:
    """Return the command for one process."""
    from danling.prove.starts import one_process

    if not options.program:
        raise ValueError(
            "Expected a program behind `--`. Received: none. Write it as you start it: -- torchrun --nproc-per-node 2 train.py."
        )
    if options.one is not None:
        return shlex.split(options.one)
    launched = one_process(options.program)
    if launched is not None and options.ranks is not None:
        raise ValueError(
            f"Expected a program without a launcher for --ranks. Received: {' '.join(options.program[:3])!r}. Leave out one of them."
        )
    if launched is not None:
        return launched
    if options.ranks is None and options.resume is None:
        raise ValueError(
            f"Expected a program that is started on several processes. Received: {' '.join(options.program[:3])!r} without --ranks. Write "
            "`--ranks 2`, a launcher such as `torchrun --nproc-per-node 2 train.py`, or `--one CMD` for one that starts its ranks itself."
        )
    return list(options.program)
