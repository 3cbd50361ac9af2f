"""Say where two runs diverge: settings, versions, code, and the first step at which losses and digests differ, and by how much.

Runs with audit.digest_interval have digests of data, gradients, optimizer and weights; of others the metrics are compared.
Ends with 1 if figures of the runs differ, with 0 if all that both have are the same, with 3 if they have none at a common step.

Example: danling diff experiments/lin/first experiments/lin/second
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .output import DAMAGED, NOTHING_THERE, OK, add_json, name_problems, print_json, print_table
from .source import one_run

if TYPE_CHECKING:
    from danling.audit.divergence import Comparison, Divergence, Pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("first", help="a run directory, or the URL of one")
    parser.add_argument("second", help="the run directory to compare it with")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print where the runs diverge."""
    from danling.audit.divergence import compare_runs  # torch

    with one_run(options.first) as first, one_run(options.second) as second:
        found = compare_runs(first, second)
        problems = name_problems([first, second])
    if options.json:
        print_json(
            {
                **asdict(found),
                "divergences": [{**asdict(p), "what": p.what} for p in found.divergences],
            }
        )
    else:
        show(found, names=(options.first, options.second))
    code = DAMAGED if found.divergences else OK
    return max(problems, code if found.figures else NOTHING_THERE)


def show(found: Comparison, *, names: tuple[str, str]) -> None:
    """Print a comparison."""
    _print_pairs("settings that differ", found.settings, names)
    _print_pairs("code that differs", found.code, names)
    show_environment(found, names=names)
    show_divergences(found.divergences, names=names)
    if not found.figures:
        print("nothing to compare: there is no step at which both runs have a figure")
    elif not found.divergences:
        steps = f"{len(found.compared)} digests" if found.compared else "no digests"
        print(f"no figure that both runs have differs ({steps} compared)")


def show_environment(found: Comparison, *, names: tuple[str, str]) -> None:
    """Print in what the environments differ, or that one was not noted."""
    _print_pairs("environment that differs", found.environment, names)
    if not found.has_environment:
        print("environments are not compared: one of the runs has no metadata/run.json\n")


def show_divergences(divergences: Sequence[Divergence], *, names: tuple[str, str]) -> None:
    """Print a table of figures that diverge, the first one first."""
    if not divergences:
        return
    first = divergences[0]
    print(f"first difference at step {first.step}: {first.what}")
    head = ("figure", "first differs at", "last equal at", *names, "difference")
    rows = [
        (p.figure, p.step, p.last_equal, *map(_exact, p.values), p.difference) for p in divergences
    ]
    print_table(head, rows)


def _print_pairs(title: str, pairs: Mapping[str, Pair], names: tuple[str, str]) -> None:
    if pairs:
        print(title)
        print_table(("", *names), [(key, *map(_exact, values)) for key, values in pairs.items()])
        print()


def _exact(value: object) -> str | None:
    # Two floats that differ in the last digit must not look alike.
    return None if value is None else str(value)
