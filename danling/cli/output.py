"""What all subcommands print with, and the exit codes."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from danling.utils.messages import table_lines
from danling.utils.plain import json_text

if TYPE_CHECKING:
    from danling.workspace.runs import Run

OK, DAMAGED, WRONG_USAGE, NOTHING_THERE, MISSING_PACKAGE, INTERRUPTED = 0, 1, 2, 3, 4, 130

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON for programs instead of text for people"
    )


def add_check_options(parser: argparse.ArgumentParser, *, rounding: str) -> None:
    """Add the options of the commands that compare starts of a program."""
    parser.add_argument(
        "--tolerance",
        type=at_least(0, float),
        help=f"relative difference that is rounding (default: {rounding})",
    )
    parser.add_argument(
        "--timeout",
        type=at_least(0, float),
        default=600.0,
        help="seconds that each start may take (default: 600)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="directory for the records, which is kept (default: one that is removed)",
    )
    add_json(parser)


def at_least(low: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return the `type` of an option that takes a number of at least `low`."""

    def parse(text: str) -> float:
        value = kind(low - 1)
        with suppress(ValueError):  # whose text would not say what is expected
            value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"Expected a number of at least {low:g}. Received: {text!r}."
            )
        return value

    return parse


def with_unit(text: str, units: Mapping[str, float], example: str) -> float:
    """Return the number that a text such as `7B`, `2.5GiB` or `7e9` means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:E[+]?\d+)?)\s*([A-Z]*)", text.strip().upper())
    value = float(found.group(1)) * units.get(found.group(2), 0) if found else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"Expected {example}. Received: {text!r}.")
    return value


def print_json(value: object) -> None:
    """Print valid JSON; numbers that are not finite become null."""
    print(json_text(value), end="")


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns that line up; numbers are set right."""
    for line in table_lines(head, rows):
        print(line)


def as_bytes(size: float) -> str:
    """Return a number of bytes in the unit that suits it: `588 B`, `50.3 kB`."""
    unit = 0
    # From there on three digits would be rounded to 1000.
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def name_problems(runs: Sequence[Run]) -> int:
    """Name on stderr the files of runs that could not be read, and return the exit code that follows from them."""
    problems = [problem for run in runs for problem in run.problems]
    for problem in problems:
        print(f"danling: left out, since it cannot be read: {problem}", file=sys.stderr)
    return DAMAGED if problems else OK
