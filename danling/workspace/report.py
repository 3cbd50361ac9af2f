"""One HTML file that shows runs: their scores, their differences, their curves. It loads nothing from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from .explain import explain
from .plots import draw_curves, png
from .runs import Run, config_differences

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top; white-space: pre-line; }
th { background: #f4f6f8; } td.number { text-align: right; }
img { max-width: 100%; height: auto; } footer { margin-top: 2rem; color: #777; font-size: .8rem; }
.wide { overflow-x: auto; }
"""


def html_report(runs: Sequence[Run], *, title: str = "Runs", **drawing: Any) -> str:
    """Return a report of runs as one self-contained HTML page."""
    picture = base64.b64encode(png(draw_curves(runs, **drawing))).decode()
    names = [run.name for run in runs]
    parts = [
        f"<h1>{escape(title)}</h1>",
        table(("run", "step", "attempts", "score", "best", "at", "latest", "last change"), map(_row, runs)),
        f'<h2>Curves</h2>\n<img alt="Curves of {escape(", ".join(names))}" src="data:image/png;base64,{picture}">',
    ]
    differences = config_differences(runs) if len(runs) > 1 else {}
    if differences:
        rows = ([key, *values] for key, values in differences.items())
        parts.append("<h2>Settings that differ</h2>\n" + table(("setting", *names), rows))
    for run in runs:
        rows = ([name, "\n".join(lines)] for name, lines in explain(run).items())
        parts.append(f"<h2>What {escape(run.name)} trained</h2>\n{table(('', ''), rows)}")
    for run in runs:
        parts.append(f"<h2>Results of {escape(run.name)}</h2>\n{_results(run)}")
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts.append(f"<footer>Made by danling on {made}</footer>")
    head, body = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>', "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table as HTML; every value is escaped, numbers are set right, `None` is empty."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(run: Run) -> list[object]:
    row = run.summary()
    names = ("run", "step", "attempts", "score_name", "best", "best_index", "latest", "changed")
    return [row[name] for name in names]


def _results(run: Run) -> str:
    columns = sorted({(split, name) for result in run.results.values() for split in result for name in result[split]})
    rows = (
        [index, *(result.get(split, {}).get(name) for split, name in columns)] for index, result in run.results.items()
    )
    return table(("", *(f"{split}/{name}" for split, name in columns)), rows)


def _cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"<td>{escape(str(value))}</td>"
    return f'<td class="number">{value:.5g}</td>' if isinstance(value, float) else f'<td class="number">{value}</td>'
