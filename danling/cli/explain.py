"""Say on one screen what a run trained: model, data, update, schedule, layout, environment, results, and what it keeps on disk.

Only files of the run are read; the program that made it and torch are not needed. `danling plot RUN -o report.html` has the same section.

Example: danling explain experiments/lin/run
"""

from __future__ import annotations

import argparse
import textwrap

from danling.workspace.explain import explain

from .output import add_json, name_problems, print_json
from .source import one_run

_WIDTH = 110
_NAMES = 13


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("path", help="directory or URL of a run")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the sections."""
    with one_run(options.path) as found:
        sections = explain(found)
        place = found.place or str(found.path)
        if options.json:
            print_json({"run": place, "sections": sections, "record": found.record, "config": found.config})
            return name_problems([found])
        print(place)
        for name, lines in sections.items():
            head = name
            for line in lines:
                for part in textwrap.wrap(line, _WIDTH - _NAMES) or [""]:
                    print(f"{head:{_NAMES}}{part}".rstrip())
                    head = ""
        return name_problems([found])
