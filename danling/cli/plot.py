"""Draw the curves of a run, or of several compared, as a PNG or as one self-contained HTML report.

Example: danling plot experiments/digits --figure loss acc --smooth 0.9 --output report.html
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.workspace.runs import Curve, Run, config_differences, labels

from .explain import explain
from .output import name_problems, write_drawing
from .runs import SUMMARY
from .source import runs_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito, https://jfly.uni-koeln.de/color/: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_STYLES = {"train": "-", "train_mean": ":"}
_ASIDE = frozenset({"skipped_updates", "eta_seconds", "memory_host_gib", "step_seconds"})
_WIDTH, _HEIGHT = 4.6, 3.0
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top; white-space: pre-line; }
th { background: #f4f6f8; } td.number { text-align: right; }
img { max-width: 100%; height: auto; } footer { margin-top: 2rem; color: #777; font-size: .8rem; }
.wide { overflow-x: auto; }
"""


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
    """Write the picture or the report, of the runs that have something to draw; the others are named on stderr."""
    is_report = options.output.suffix.lower() == ".html"
    if not is_report and options.output.suffix.lower() != ".png":
        raise ValueError(f"Expected --output to end in .png or .html. Received: {str(options.output)!r}.")
    with runs_at(*options.paths) as found:
        runs = collected(dict(zip(options.paths, found)))
        logged = [run for run in runs if run.figures]
        if not logged and any(run.problems for run in runs):
            return name_problems(runs)  # what was logged cannot be read
        if not logged:
            raise FileNotFoundError(
                f"Expected runs with metrics in metrics.jsonl. Received: {[str(run.path) for run in runs]}. Name runs that have logged."
            )
        names = [name for panel in group(logged, options.figure).values() for name in panel]
        drawn = [run for run in logged if any(run.curve(name, by=options.by)[0] for name in names)] or logged
        for run in runs:
            if run not in drawn and not run.problems:
                print(f"danling: not drawn, since it has no such metrics: {run.path}", file=sys.stderr)
        how: dict[str, Any] = {"by": options.by, "smooth": options.smooth, "log_scale": options.log_scale}
        how["figures"] = options.figure
        write_drawing(
            options.output,
            html_report(runs, title=options.title, **how) if is_report else png(draw_curves(drawn, **how)),
        )
        print(f"{options.output}: {len(drawn)} run{'s' if len(drawn) != 1 else ''}")
        return name_problems(runs)


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


# Curves


def draw_curves(
    runs: Sequence[Run],
    *,
    figures: Sequence[str] = (),
    by: str = "step",
    smooth: float = 0.0,
    log_scale: bool = False,
) -> Figure:
    """Draw the curves of runs, one panel for each quantity; its splits share the panel, and each run has its colour."""
    if not 0 <= smooth < 1:
        raise ValueError(f"Expected smooth in [0, 1). Received: smooth={smooth!r}.")
    panels = group(runs, figures)
    canvas = _new_figure(list(panels), "seconds" if by == "time" else "step", log_scale)
    titles = labels(runs) if len(runs) > 1 else [""]
    for axes, names in zip(canvas.axes, panels.values()):
        for index, run in enumerate(runs):
            for name in names:
                color = COLORS[index % len(COLORS)] if len(runs) > 1 else None
                _draw(axes, run, name, by, smooth, color, titles[index])
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, framealpha=0.6)
    return canvas


def draw_differences(curves: Mapping[str, Curve]) -> Figure:
    """Draw by how much figures of two runs differ, one panel for each, with a logarithmic vertical axis."""
    canvas = _new_figure([f"difference of {name}" for name in curves], "step", True)
    for axes, (steps, values) in zip(canvas.axes, curves.values()):
        shown = [(x, y) for x, y in zip(steps, values) if y]
        axes.plot([x for x, _ in shown], [y for _, y in shown], marker=".")
    return canvas


def group(runs: Sequence[Run], figures: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the figures to draw, by quantity: `{"loss": ["train/loss", "val/loss"]}`."""
    known = sorted({name for run in runs for name in run.figures})
    for wanted in figures:
        if not any(wanted in (name, quantity_of(name)) for name in known):
            raise ValueError(
                f"Expected a metric that was logged: {', '.join(known) or 'none was'}. Received: {wanted!r}."
            )
    chosen = [name for name in known if quantity_of(name) not in _ASIDE]
    if figures:
        chosen = [name for name in known if {name, quantity_of(name)} & set(figures)]
    if not chosen:
        raise ValueError(f"Expected runs with metrics in metrics.jsonl. Received: {[str(run.path) for run in runs]}.")
    panels: dict[str, list[str]] = {}
    for name in chosen:
        panels.setdefault(quantity_of(name), []).append(name)
    # Losses first, and what was evaluated before what only describes the pace.
    return dict(sorted(panels.items(), key=lambda item: (item[0] != "loss", len(item[1]) == 1, item[0])))


def quantity_of(figure: str) -> str:
    """Return the name of a figure without its split."""
    return figure.partition("/")[2] or figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential mean of each value and all before it, corrected for its start as in Adam (arXiv:1412.6980)."""
    total, mass, result = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        result.append(total / mass)
    return result


def png(figure: Figure, *, dpi: int = 110) -> bytes:
    """Return a figure as a PNG picture, the same bytes for the same curves."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()


def _new_figure(titles: Sequence[str], position: str, log_scale: bool) -> Figure:
    """Return a figure with an empty panel for each title."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib to be installed. Received: no such package. Run `pip install matplotlib`."
        ) from error
    columns = min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    # Its own figure, not pyplot's: nothing global changes, and no display is looked for.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for index, title in enumerate(titles, 1):
        axes = figure.add_subplot(rows, columns, index, yscale="log" if log_scale else "linear")
        axes.set_prop_cycle(color=COLORS)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(position, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    return figure


def _draw(axes: Any, run: Run, name: str, by: str, smooth: float, color: str | None, title: str) -> None:
    xs, ys = run.curve(name, by=by)
    if not xs:
        return
    split = name.partition("/")[0]
    label = f"{title} {split}".strip()
    style: dict[str, Any] = {"color": color, "linewidth": 1.3, "label": label}
    if split not in _STYLES:
        axes.plot(xs, ys, linestyle="--", marker="o", markersize=3, **style)
        return
    if smooth and split == "train" and not quantity_of(name).startswith("learning_rate"):
        faint = axes.plot(xs, ys, alpha=0.25, linewidth=0.8, color=style["color"])[0]
        style["color"] = faint.get_color()
        ys = smoothed(ys, smooth)
    axes.plot(xs, ys, linestyle=_STYLES[split], **style)


# Report


def html_report(runs: Sequence[Run], *, title: str = "Runs", **drawing: Any) -> str:
    """Return a report of runs as one self-contained HTML page."""
    picture = base64.b64encode(png(draw_curves(runs, **drawing))).decode()
    names = [run.name for run in runs]
    parts = [
        f"<h1>{escape(title)}</h1>",
        table(SUMMARY.values(), ([run.summary()[name] for name in SUMMARY] for run in runs)),
        f'<h2>Curves</h2>\n<img alt="Curves of {escape(", ".join(names))}" src="data:image/png;base64,{picture}">',
    ]
    differences = config_differences(runs) if len(runs) > 1 else {}
    if differences:
        rows = ([key, *values] for key, values in differences.items())
        parts.append("<h2>Settings that differ</h2>\n" + table(("setting", *names), rows))
    for run in runs:
        sections = ([name, "\n".join(lines)] for name, lines in explain(run).items())
        parts.append(f"<h2>What {escape(run.name)} trained</h2>\n{table(('', ''), sections)}")
        columns = sorted({(split, name) for of in run.results.values() for split in of for name in of[split]})
        results = ([at, *(of.get(split, {}).get(name) for split, name in columns)] for at, of in run.results.items())
        titles = ["", *(f"{split}/{name}" for split, name in columns)]
        parts.append(f"<h2>Results of {escape(run.name)}</h2>\n{table(titles, results)}")
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts.append(f"<footer>Made by danling on {made}</footer>")
    head, body = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>', "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table as HTML; every value is escaped, numbers are set right, `None` is empty."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"<td>{escape(str(value))}</td>"
    return f'<td class="number">{value:.5g}</td>' if isinstance(value, float) else f'<td class="number">{value}</td>'
