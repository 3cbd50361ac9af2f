"""Compare the first updates of a program on a layout with those in one process, and name the parameters that differ.

The program is started in one process, and then in as many as the layout has, each time with DANLING_SETTINGS in its environment:
the degrees, the weights of the one process to begin from, the same samples in each update, in shares that differ, dropout off, float64,
running statistics in batch normalization.
The gradient of every parameter is compared before it is clipped; then the loss, and the weights after the update.

Ends with 0 if all is the same but for rounding, with 1 if not, with 2 if it could not be checked.

Example: danling check-layout shard=2,tensor=2 -- python train.py --width 64
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from .output import DAMAGED, OK, WRONG_USAGE, add_check_options, at_least, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "layout",
        help="axes and their degrees, such as shard=2,tensor=2; or ddp=2, accelerate=2: their product is started",
    )
    parser.add_argument(
        "--updates", type=at_least(1), default=2, help="updates to compare (default: 2)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "own"),
        default="float64",
        help="float64, or the precision of the program, where rounding is larger (default: float64)",
    )
    parser.add_argument(
        "--batch",
        type=at_least(1),
        help="samples of an update (default: those of the program, in shares that differ)",
    )
    add_check_options(parser, rounding="by the dtype")
    parser.epilog = "After `--` comes the program, as you start it for one process."


def run(options: argparse.Namespace) -> int:
    """Check and print."""
    from danling.audit.layout_check import CheckOptions, Layout, check_layout  # torch

    layout = Layout.parse(options.layout)
    how = CheckOptions(
        updates=options.updates,
        dtype=None if options.dtype == "own" else options.dtype,
        batch=options.batch,
        tolerance=options.tolerance,
        timeout=options.timeout,
    )
    with tempfile.TemporaryDirectory(prefix="danling-layout-") as temporary:
        found = check_layout(options.program, layout, options.scratch or Path(temporary), how)
    if options.json:
        facts = {"same": found.is_same, **asdict(found), "stack": found.layout.stack}
        print_json({**facts, "layout": dict(found.layout.degrees)})
    else:
        print(found)
    if found.undecided:
        return WRONG_USAGE
    return OK if found.is_same else DAMAGED
