"""Draw the curves of a run, or of several compared, as a PNG or as one self-contained HTML report.

Example: danling plot experiments/digits --figure loss acc --smooth 0.9 --output report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from danling.utils.files import write_atomically
from danling.workspace.plots import draw_curves, png
from danling.workspace.report import html_report
from danling.workspace.runs import Run, find_runs

from .output import name_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("paths", nargs="+", help="run directories, or directories of runs")
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
    runs = collect(options.paths)
    drawing = {"figures": options.figure, "by": options.by, "smooth": options.smooth, "log_scale": options.log_scale}
    content: bytes | str
    content = (
        html_report(runs, title=options.title, **drawing) if suffix == ".html" else png(draw_curves(runs, **drawing))
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, content)
    print(f"{options.output}: {len(runs)} run{'s' if len(runs) != 1 else ''}")
    return name_problems(runs)


def collect(paths: list[str]) -> list[Run]:
    """Return the runs at or below several paths, each once.

    Raises:
        FileNotFoundError: If a path has none.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        runs = find_runs(path)
        if not runs:
            raise FileNotFoundError(
                f"Expected a run directory or a directory of runs. Received: {path!r}, which has none."
            )
        found.update({run.path.resolve(): run for run in runs})
    names = [run.name for run in found.values()]
    # Two roots may have runs of the same name: then only the path tells them apart.
    return [Run(r.path, str(r.path)) if names.count(r.name) > 1 else r for r in found.values()]
