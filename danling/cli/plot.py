"""Draw the curves of a run, or of several compared, as a PNG or as one self-contained HTML report.

Example: danling plot experiments/digits --figure loss acc --smooth 0.9 --output report.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from danling.workspace.plots import draw_curves, group, png
from danling.workspace.report import html_report
from danling.workspace.runs import Run

from .output import name_problems, write_drawing
from .source import runs_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("paths", nargs="+", help="run directories, or directories or URLs of runs")
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("curves.png"), help="a .png or .html file (default: curves.png)"
    )
    parser.add_argument(
        "--figure", nargs="+", default=[], metavar="NAME", help="loss, val/acc ... (default: all but the pace)"
    )
    parser.add_argument("--by", choices=("step", "time"), default="step", help="horizontal axis")
    parser.add_argument("--smooth", type=float, default=0.0, help="weight of the past in training curves, in [0, 1)")
    parser.add_argument("--log-scale", action="store_true", help="logarithmic vertical axis")
    parser.add_argument("--title", default="Runs", help="heading of a report")


def run(options: argparse.Namespace) -> int:
    """Write the picture or the report."""
    suffix = options.output.suffix.lower()
    if suffix not in (".png", ".html"):
        raise ValueError(f"Expected --output to end in .png or .html. Received: {str(options.output)!r}.")
    with runs_at(*options.paths) as found:
        return _draw(options, suffix, collected(dict(zip(options.paths, found))))


def _draw(options: argparse.Namespace, suffix: str, runs: list[Run]) -> int:
    drawn = with_curves(runs, options.figure, options.by)
    if not drawn:
        return name_problems(runs)
    drawing = {"figures": options.figure, "by": options.by, "smooth": options.smooth, "log_scale": options.log_scale}
    content: bytes | str
    content = (
        html_report(runs, title=options.title, **drawing) if suffix == ".html" else png(draw_curves(drawn, **drawing))
    )
    write_drawing(options.output, content)
    print(f"{options.output}: {len(drawn)} run{'s' if len(drawn) != 1 else ''}")
    return name_problems(runs)


def with_curves(runs: Sequence[Run], figures: Sequence[str], by: str) -> list[Run]:
    """Return the runs that have something to draw, and name the others on stderr. None are left where what was logged cannot
    be read.
    """
    logged = [run for run in runs if run.figures]
    if not logged:
        if any(run.problems for run in runs):
            return []
        raise FileNotFoundError(
            f"Expected runs with metrics in metrics.jsonl. Received: {[str(run.path) for run in runs]}. Name runs that have logged."
        )
    names = [name for panel in group(logged, figures).values() for name in panel]
    drawn = [run for run in logged if any(run.curve(name, by=by)[0] for name in names)] or logged
    for run in runs:
        if run not in drawn and not run.problems:
            print(f"danling: not drawn, since it has no such metrics: {run.path}", file=sys.stderr)
    return drawn


def collected(places: Mapping[str, list[Run]]) -> list[Run]:
    """Return the runs at or below several places, each once."""
    found: dict[Path, Run] = {}
    for path, runs in places.items():
        if not runs:
            raise FileNotFoundError(
                f"Expected a run directory or a directory of runs. Received: {path!r}, which has none."
            )
        found.update({run.path.resolve(): run for run in runs})
    names = [run.name for run in found.values()]
    # Two roots may have runs of the same name: then only the path tells them apart.
    return [replace(r, name=r.place or str(r.path)) if names.count(r.name) > 1 else r for r in found.values()]
