"""A bar with the curves so far, as the output of the cell of a notebook that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from html import escape
from typing import Any, TextIO

SECONDS_BETWEEN_DRAWINGS = 0.3
_MOST_POINTS = 400
_MOST_PANELS = 3
_WIDTH, _HEIGHT, _MARGIN = 300, 130, 18
_COLOURS = ("#3f51b5", "#d9730d", "#2e7d32", "#8e24aa", "#00838f", "#c62828")


class NotebookBar:
    """Draws how far the run is, and its curves, into the output of a cell; has the methods of a bar of `tqdm` that `Progress` calls."""

    def __init__(
        self,
        total: int | None,
        *,
        initial: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        show: Callable[[str], Callable[[str], object]] | None = None,
    ) -> None:
        self.total = total
        self.step = initial
        self._initial = initial
        self._clock = clock
        self._started = clock()
        self._text = ""
        self._curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self._drawn = -SECONDS_BETWEEN_DRAWINGS
        self._replace = (show or _display)(self.html())

    def update(self, steps: int) -> None:
        """Count steps, and draw now and then."""
        self.step += steps
        self._draw()

    def set_description_str(self, text: str, refresh: bool = True) -> None:
        """Set what stands above the bar."""
        self._text = text
        if refresh:
            self._draw(at_once=True)

    def curve(self, step: int, values: Mapping[str, Mapping[str, float]]) -> None:
        """Add points to the curves."""
        for split, metrics in values.items():
            for name, value in metrics.items():
                if name in self._curves or len(self._curves) < _MOST_PANELS:
                    points = self._curves.setdefault(name, {}).setdefault(split, [])
                    points.append((step, float(value)))
                    if len(points) > _MOST_POINTS:
                        del points[1:-1:2]  # every second point: a long run keeps its shape

    def external_write_mode(self, file: TextIO | None = None, nolock: bool = False) -> AbstractContextManager[object]:
        """Return a context in which somebody else may write: lines of a cell stand below its bar."""
        return nullcontext()

    def close(self) -> None:
        """Draw a last time."""
        self._draw(at_once=True)

    def _draw(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if at_once or now - self._drawn >= SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._replace(self.html())

    def html(self) -> str:
        """Return the bar and the curves."""
        done = self.step - self._initial
        left = ""
        if self.total and done > 0:
            seconds = (self._clock() - self._started) / done * max(self.total - self.step, 0)
            left = f", {seconds:.0f} s left" if self.step < self.total else ""
        count = f"{self.step}/{self.total}{left}" if self.total else f"{self.step}"
        bar = f'<progress max="{self.total}" value="{self.step}" style="width: 20em"></progress> ' if self.total else ""
        panels = "".join(_panel(name, lines) for name, lines in self._curves.items())
        return (
            '<div style="font-family: monospace; font-size: 90%">'
            f"<div>{escape(self._text)}</div><div>{bar}{count}</div><div>{panels}</div></div>"
        )


def _panel(name: str, lines: Mapping[str, list[tuple[int, float]]]) -> str:
    """Return the curves of one metric, a split each, as a picture."""
    points = [point for line in lines.values() for point in line if abs(point[1]) < float("inf")]
    if len(points) < 2:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)

    def at(step: int, value: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * (step - first) / max(last - first, 1)
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2.5 * _MARGIN) * (value - low) / (high - low or 1.0)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{_MARGIN}" y="12" fill="currentColor">{escape(name)}</text>']
    for index, (split, line) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        finite = [at(step, value) for step, value in line if abs(value) < float("inf")]
        if len(finite) == 1:
            x, _, y = finite[0].partition(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
        else:
            parts.append(f'<polyline points="{" ".join(finite)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        place = _MARGIN + 60 + 70 * index
        parts.append(f'<text x="{place}" y="12" fill="{colour}">{escape(split)}</text>')
    for text, height in ((f"{high:.4g}", 1.5 * _MARGIN), (f"{low:.4g}", _HEIGHT - 4.0)):
        parts.append(f'<text x="{_WIDTH - 4}" y="{height}" text-anchor="end" fill="currentColor">{text}</text>')
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">{"".join(parts)}</svg>'


def _display(html: str) -> Callable[[str], object]:
    """Show HTML below the cell that runs, and return what replaces it."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(html), display_id=True)  # type: ignore[no-untyped-call]
    return lambda other: handle.update(HTML(other))  # type: ignore[no-untyped-call]
