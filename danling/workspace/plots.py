"""Curves of one run or of several as pictures, drawn by matplotlib without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .runs import Curve, Run, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito, https://jfly.uni-koeln.de/color/: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_STYLES = {"train": "-", "train_mean": ":"}
_ASIDE = frozenset({"skipped_updates", "eta_seconds", "memory_host_gib", "step_seconds"})
_WIDTH, _HEIGHT = 4.6, 3.0


def draw_curves(
    runs: Sequence[Run],
    *,
    figures: Sequence[str] = (),
    by: str = "step",
    smooth: float = 0.0,
    log_scale: bool = False,
    columns: int = 3,
) -> Figure:
    """Draw the curves of runs, one panel for each quantity; its splits share the panel, and each run has its colour."""
    if not 0 <= smooth < 1:
        raise ValueError(f"Expected smooth in [0, 1). Received: smooth={smooth!r}.")
    panels = group(runs, figures)
    canvas = _new_figure(len(panels), columns)
    titles = labels(runs) if len(runs) > 1 else [""]
    for axes, (quantity, names) in zip(canvas.axes, panels.items()):
        for index, run in enumerate(runs):
            for name in names:
                color = COLORS[index % len(COLORS)] if len(runs) > 1 else None
                _draw(axes, run, name, by, smooth, color, titles[index])
        axes.set_title(quantity, fontsize=10)
        axes.set_xlabel("seconds" if by == "time" else "step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        if log_scale:
            axes.set_yscale("log")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, framealpha=0.6)
    return canvas


def draw_differences(curves: Mapping[str, Curve]) -> Figure:
    """Draw by how much figures of two runs differ, one panel for each, with a logarithmic vertical axis."""
    canvas = _new_figure(len(curves), 3)
    for axes, (name, (steps, values)) in zip(canvas.axes, curves.items()):
        shown = [(x, y) for x, y in zip(steps, values) if y]
        axes.plot([x for x, _ in shown], [y for _, y in shown], marker=".")
        axes.set_title(f"difference of {name}", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_yscale("log")
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    return canvas


def group(runs: Sequence[Run], figures: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the figures to draw, by quantity: `{"loss": ["train/loss", "val/loss"]}`."""
    known = sorted({name for run in runs for name in run.figures})
    for wanted in figures:
        if not any(wanted in (name, quantity_of(name)) for name in known):
            raise ValueError(
                f"Expected a metric that was logged: {', '.join(known) or 'none was'}. Received: {wanted!r}."
            )
    chosen = (
        [n for n in known if {n, quantity_of(n)} & set(figures)]
        if figures
        else [n for n in known if quantity_of(n) not in _ASIDE]
    )
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


def _new_figure(panels: int, columns: int) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib to be installed. Received: no such package. Run `pip install matplotlib`."
        ) from error
    width = min(columns, panels)
    height = math.ceil(panels / width)
    # Its own figure, not pyplot's: nothing global changes, and no display is looked for.
    figure = Figure(figsize=(_WIDTH * width, _HEIGHT * height), layout="constrained")
    for index in range(panels):
        figure.add_subplot(height, width, index + 1).set_prop_cycle(color=COLORS)
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
