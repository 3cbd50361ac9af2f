"""Draw the curves of a run, or of several compared, as a PNG: a panel for each metric.

Example: danling plot experiments/digits --figure loss acc --smooth 0.9 --output curves.png
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.files import write_atomically
from danling.workspace.runs import Curve, Run, find_runs, labels

from .output import name_problems
from .source import runs_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito, https://jfly.uni-koeln.de/color/: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_STYLES = {"train": "-", "train_mean": ":"}
_ASIDE = frozenset({"skipped_updates", "eta_seconds", "memory_host_gib", "step_seconds"})
"""Figures of the pace, which are drawn only where they are asked for."""
_NAMED, _MOST_PANELS = 20, 100
_WIDTH, _HEIGHT = 4.6, 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("paths", nargs="+", help="run directories, or directories or URLs of runs")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("curves.png"),
        help="a .png file (default: curves.png)",
    )
    parser.add_argument(
        "--figure",
        nargs="+",
        default=[],
        metavar="NAME",
        help="loss, val/acc ... (default: all but the pace)",
    )
    parser.add_argument("--by", choices=("step", "time"), default="step", help="horizontal axis")
    parser.add_argument(
        "--smooth", type=float, default=0.0, help="weight of the past in training curves, in [0, 1)"
    )
    parser.add_argument("--log-scale", action="store_true", help="logarithmic vertical axis")


def run(options: argparse.Namespace) -> int:
    """Write the picture of the runs that have something to draw; the others are named on stderr."""
    if options.output.suffix.lower() != ".png":
        raise ValueError(f"Expected --output to end in .png. Received: {str(options.output)!r}.")
    with runs_at(*options.paths) as found:
        empty = [path for path, below in zip(options.paths, found) if not below]
        if empty:
            raise FileNotFoundError(
                f"Expected a run directory or a directory of runs. Received: {empty[0]!r}, which has none."
            )
        # Two arguments may lead to one run, which is drawn once.
        runs = list({run.path.resolve(): run for below in found for run in below}.values())
        names = [run.name for run in runs]
        # Two roots may have runs of the same name: then only the path tells them apart.
        runs = [
            replace(r, name=r.location or str(r.path)) if names.count(r.name) > 1 else r
            for r in runs
        ]
        logged = [run for run in runs if run.figures]
        if not logged and any(run.problems for run in runs):
            return name_problems(runs)  # what was logged cannot be read
        chosen = [name for panel in group(logged, options.figure).values() for name in panel]
        drawn = [
            run for run in logged if any(run.curve(name, by=options.by)[0] for name in chosen)
        ] or logged
        for run in (run for run in runs if run not in drawn and not run.problems):
            print(f"danling: not drawn, since it has no such metrics: {run.path}", file=sys.stderr)
        figure = draw_curves(
            drawn,
            figures=options.figure,
            by=options.by,
            smooth=options.smooth,
            log_scale=options.log_scale,
        )
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output, png(figure))
        print(f"{options.output}: {len(drawn)} run{'s' if len(drawn) != 1 else ''}")
        return name_problems(runs)


def draw_curves(
    runs: Sequence[Run] | str | os.PathLike[str],
    *,
    figures: Sequence[str] = (),
    by: str = "step",
    smooth: float = 0.0,
    log_scale: bool = False,
) -> Figure:
    """Draw the curves of runs, one panel for each quantity; its splits share the panel, and each run has its colour.

    Args:
        runs: A directory of a run or of several, such as `runner.workspace.dir`, or runs that `find_runs` returned.
        figures: Metrics such as `loss` or `val/acc`; none: all but the pace.
        by: `step`, or `time` for seconds.
        smooth: Weight of the past in training curves, in [0, 1).
        log_scale: Whether the vertical axes are logarithmic.

    Returns:
        A figure of matplotlib, which a notebook shows.
    """
    if isinstance(runs, (str, os.PathLike)):
        runs = find_runs(runs)
    if not 0 <= smooth < 1:
        raise ValueError(f"Expected smooth in [0, 1). Received: smooth={smooth!r}.")
    panels = group(runs, figures)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib to be installed. Received: no such package. Run `pip install matplotlib`."
        ) from error
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    titles = labels(runs) if len(runs) > 1 else [""]

    class Curves(Figure):
        """A figure that is not pyplot's: nothing global changes, and no display is looked for. A notebook shows it all the same."""

        def _repr_png_(self) -> bytes:
            return png(self)

    canvas = Curves(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for number, (quantity, names) in enumerate(panels.items(), 1):
        axes = canvas.add_subplot(rows, columns, number, yscale="log" if log_scale else "linear")
        axes.set_prop_cycle(color=COLORS)
        axes.set_title(quantity, fontsize=10)
        axes.set_xlabel("seconds" if by == "time" else "step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        for index, run in enumerate(runs):
            for name in names:
                color = COLORS[index % len(COLORS)] if len(runs) > 1 else None
                _draw(axes, run.curve(name, by=by), name, smooth, color, titles[index])
        # matplotlib warns of a legend without entries.
        if axes.get_legend_handles_labels()[1]:
            # Below the panel: within it there may be no room that is free of curves.
            axes.legend(
                fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2
            )
    return canvas


def _draw(axes: Any, curve: Curve, name: str, smooth: float, color: str | None, title: str) -> None:
    (xs, ys), split = curve, name.partition("/")[0]
    if not xs:
        return
    style: dict[str, Any] = {"color": color, "linewidth": 1.3, "label": f"{title} {split}".strip()}
    if split not in _STYLES:
        axes.plot(xs, ys, linestyle="--", marker="o", markersize=3, **style)
        return
    # A schedule has no noise, and what is evaluated has few points.
    if smooth and split == "train" and not quantity_of(name).startswith("learning_rate"):
        faint = axes.plot(xs, ys, alpha=0.25, linewidth=0.8, color=color)[0]
        # For a single run the cycle chooses the colour: the smooth curve must not take the next.
        style["color"] = faint.get_color()
        ys = smoothed(ys, smooth)
    axes.plot(xs, ys, linestyle=_STYLES[split], **style)


def group(runs: Sequence[Run], figures: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the figures to draw, by quantity: `{"loss": ["train/loss", "val/loss"]}`."""
    known = sorted({name for run in runs for name in run.figures})
    if not known:
        raise FileNotFoundError(
            "Expected runs with metrics in metrics.jsonl. Received: none. Name runs that have logged."
        )
    names = {*known, *map(quantity_of, known)}
    unknown = [name for name in figures if name not in names]
    if unknown:
        more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
        raise ValueError(
            f"Expected a metric that was logged: {', '.join(known[:_NAMED])}{more}. Received: {unknown[0]!r}."
        )
    if figures:
        chosen = [name for name in known if {name, quantity_of(name)} & set(figures)]
    else:
        chosen = [name for name in known if quantity_of(name) not in _ASIDE] or known
    panels: dict[str, list[str]] = {}
    for name in chosen:
        panels.setdefault(quantity_of(name), []).append(name)
    if len(panels) > _MOST_PANELS:
        raise ValueError(
            f"Expected at most {_MOST_PANELS} metrics to draw. Received: {len(panels)}. Name some, such as {next(iter(panels))!r}."
        )
    # Losses first, and what was evaluated before what only describes the pace.
    return dict(
        sorted(panels.items(), key=lambda item: (item[0] != "loss", len(item[1]) == 1, item[0]))
    )


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
    # matplotlib would write its version as `Software`, and the bytes would differ between releases.
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()
