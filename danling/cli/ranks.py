"""Say what the ranks of a run spent their time with, which of them held the others up, and by what.

Examples: danling ranks experiments/lin/run
          danling ranks s3://bucket/prefix/lin/run --output ranks.png
"""

from __future__ import annotations

import argparse

from danling.reporting.rank_times import ACTIVITIES, RankRow, lost_curves, rank_table
from danling.workspace.plots import draw_ranks, png
from danling.workspace.runs import Run

from .output import add_drawing, add_json, check_drawing, name_problems, print_json, print_table, write_drawing
from .source import one_run

_HEAD = ("rank", "host", "lost (s)", "share", "by", *(f"{name} (s)" for name in ACTIVITIES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("path", help="directory or URL of a run")
    add_drawing(parser, "draw a .png file")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table, and draw it."""
    check_drawing(options.output)
    with one_run(options.path) as found:
        return _print(options, found)


def _print(options: argparse.Namespace, run: Run) -> int:
    rows = rank_table(run.records)
    if not rows:
        code = name_problems([run])
        if code:
            return code
        raise FileNotFoundError(
            f"Expected times of ranks in metrics.jsonl of {options.path!r}. Received: none. They are written with each log line of a run "
            "on several processes, unless comm.slow_rank_share is none."
        )
    if options.output is not None:
        write_drawing(options.output, png(draw_ranks(rows, lost_curves(run.records))))
    if options.json:
        print_json({"run": run.place or str(run.path), "ranks": [_plain(row) for row in rows]})
        return name_problems([run])
    print_table(_HEAD, [_cells(row) for row in rows])
    if options.output is not None:
        print(f"{options.output}: {len(rows)} rank{'s' if len(rows) != 1 else ''}")
    return name_problems([run])


def _plain(row: RankRow) -> dict[str, object]:
    times = {name: round(value, 4) for name, value in row.seconds.items()}
    plain = {"rank": row.rank, "host": row.host, "lost": round(row.lost, 4), "share": row.share, "cause": row.cause}
    return {**plain, "seconds": times}


def _cells(row: RankRow) -> list[object]:
    times = (round(row.seconds[name], 1) for name in ACTIVITIES)
    return [row.rank, row.host, round(row.lost, 1), f"{100 * row.share:.1f}%", row.cause, *times]
