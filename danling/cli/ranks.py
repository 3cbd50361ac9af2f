"""Print what the ranks of a run spent their time on, which of them slowed the others down by what, and where the ranks changed.

Examples: danling ranks experiments/lin/run
          danling ranks s3://bucket/prefix/lin/run
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from danling.reporting.rank_times import ACTIVITIES, RankRow, rank_table

from .output import OK, add_json, name_problems, print_json, print_table
from .source import one_run

_HEAD = ("rank", "host", "lost (s)", "share", "by", *(f"{name} (s)" for name in ACTIVITIES))

_CHANGE = ("update", "ranks after it", "gap (s)", "made again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("path", help="directory or URL of a run")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    with one_run(options.path) as found:
        rows, code = rank_table(found.records), name_problems([found])
        changes = [_change(record) for record in found.records if "elastic/ranks" in record]
        if not rows and not changes and code == OK:
            raise FileNotFoundError(
                f"Expected times of ranks in metrics.jsonl of {options.path!r}. Received: none. They are written with each log line of a "
                "run on several processes, unless comm.slow_rank_share is none."
            )
        if options.json:
            print_json(
                {
                    "run": found.location or str(found.path),
                    "ranks": [vars(row) for row in rows],
                    "changes": [dict(zip(_CHANGE, change)) for change in changes],
                }
            )
            return code
        if changes:
            print_table(_CHANGE, changes)
        if rows:
            print_table(_HEAD, [_rank(row) for row in rows])
        return code


def _rank(row: RankRow) -> tuple[object, ...]:
    """Return a line of the table of ranks."""
    seconds = (round(row.seconds[name], 1) for name in ACTIVITIES)
    return row.rank, row.host, round(row.lost, 1), f"{100 * row.share:.1f}%", row.cause, *seconds


def _change(record: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a line of the table of changes, with `elastic.enabled`."""
    gap = round(float(record.get("elastic/gap_seconds") or 0.0), 3)
    return (
        record["step"],
        int(record["elastic/ranks"]),
        gap,
        "yes" if record.get("elastic/repeated") else "no",
    )
