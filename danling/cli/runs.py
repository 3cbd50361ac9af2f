"""List the runs below a directory: steps, best and latest scores, where their settings differ, and both sides of each stream.

Examples: danling runs experiments --sort best
          danling runs s3://bucket/prefix
"""

from __future__ import annotations

import argparse
from typing import Any

from danling.utils.messages import as_text
from danling.workspace.run_directory import natural_key
from danling.workspace.runs import Run, config_differences, streams_of

from .output import NOTHING_THERE, add_json, name_problems, print_json, print_table
from .source import runs_at

SUMMARY = {
    "run": "run",
    "step": "step",
    "attempts": "attempts",
    "score_name": "score",
    "best": "best",
    "best_index": "at",
    "latest": "latest",
    "changed": "last change",
}
"""Of `Run.summary`, what a table of runs shows, and under which title."""
_STREAM_HEAD = (
    "stream",
    "published",
    "trained",
    "waiting",
    "end",
    "made by",
    "waited (s)",
    "trained on by",
    "waited (s)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "root",
        nargs="?",
        default="experiments",
        help="directory or URL of the runs (default: experiments)",
    )
    parser.add_argument(
        "--sort",
        choices=("name", "best", "latest", "step", "changed"),
        default="name",
        help="order of the rows",
    )
    parser.add_argument("--reverse", action="store_true", help="turn the order around")
    parser.add_argument(
        "--all-settings",
        action="store_true",
        help="also compare settings that do not change the result",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the runs."""
    with runs_at(options.root) as (found,):
        runs = ordered(found, options.sort, reverse=options.reverse)
        differences = config_differences(runs, everything=options.all_settings)
        streams = streams_of(runs)
        if options.json:
            keyed = {
                key: dict(zip((r.name for r in runs), values))
                for key, values in differences.items()
            }
            print_json(
                {"runs": [run.summary() for run in runs], "differences": keyed, "streams": streams}
            )
            # To a program, an empty list is an answer.
            return name_problems(runs) if runs else NOTHING_THERE
        if not runs:
            raise FileNotFoundError(
                f"Expected runs below {options.root!r}. Received: none. Name another directory."
            )
        rows = [
            {
                **run.summary(),
                "changed": f"{run.changed:%Y-%m-%d %H:%M} UTC" if run.changed else None,
            }
            for run in runs
        ]
        print_table(list(SUMMARY.values()), [[row[name] for name in SUMMARY] for row in rows])
        if differences:
            print("\nsettings that differ")
            columns = [[run.name for run in runs]]
            columns += [[as_text(value) for value in of] for of in differences.values()]
            print_table(("run", *differences), list(zip(*columns)))
        if streams:
            print("\nstreams")
            print_table(_STREAM_HEAD, [_stream_row(stream) for stream in streams])
        return name_problems(runs)


def _stream_row(stream: dict[str, Any]) -> list[object]:
    row = [stream[name] for name in _STREAM_HEAD[:5]]
    for sides in (stream["producers"], stream["trainers"]):
        row += [", ".join(side["run"] for side in sides) or None]
        row += [", ".join(f"{side['waited_seconds']:.1f}" for side in sides) or None]
    return row


def ordered(runs: list[Run], key: str, *, reverse: bool = False) -> list[Run]:
    """Return runs in the order of a column; those that have no value in it come last."""
    if key == "name":
        return sorted(
            runs,
            key=lambda run: [natural_key(part) for part in run.name.split("/")],
            reverse=reverse,
        )
    rows = [(run.summary()[key], run) for run in runs]
    known = sorted(
        (row for row in rows if row[0] is not None), key=lambda row: row[0], reverse=reverse
    )
    return [run for _, run in known] + [run for value, run in rows if value is None]
