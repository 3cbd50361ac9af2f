"""How far the run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from danling.utils.messages import Paced, format_count
from danling.utils.process import in_notebook

from .logging import SHOWN_ON_BAR, bar_closed, bar_opened

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("danling")

_BAR = "{desc}  {n_fmt}/{total_fmt}, {remaining} left |{bar}|"
"""Metrics first: tqdm cuts off on the right what has no room."""
_NARROWEST_BAR = 10
_BESIDE_BAR = len("  /, 00:00 left ||")

SECONDS_BETWEEN_DRAWINGS = 0.3
_MOST_POINTS = 400
_MOST_PANELS = 3
_WIDTH, _HEIGHT, _MARGIN = 300, 130, 18
_COLOURS = ("#3f51b5", "#d9730d", "#2e7d32", "#8e24aa", "#00838f", "#c62828")


class Progress:
    """Progress towards a number of steps.

    On a terminal it draws a bar of `tqdm`, metrics first. Where there is little room, the name gives way, and then one metric after
    the other from the last on, until ten columns are left for the bar. In a notebook the bar and the curves are the output of the cell.
    Elsewhere (a file, a pipe, CI) nothing is drawn, and `show` writes a line of the log, at most one in `seconds_between_lines`; the
    first and the last are always written. Counting costs about a microsecond a step with a bar, a tenth of one without.

    Args:
        total: Steps of the whole run; `None` when not known.
        initial: Steps done before this attempt.
        desc: Name in front of the bar and of each line.
        stream: Where the bar is drawn; `None` is `sys.stderr`, or the output of the cell in a notebook.
        seconds_between_lines: Seconds at least from one line to the next.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        total: int | None,
        *,
        initial: int = 0,
        desc: str = "",
        stream: TextIO | None = None,
        seconds_between_lines: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        notebook = stream is None and in_notebook()
        self._stream = stream if stream is not None else sys.stderr
        self.total = total
        self.initial = initial
        self.desc = desc
        self.step = initial
        self.epoch = ""
        """The text after the name, such as `epoch 2/5`."""
        self._clock = clock
        self._started = clock()
        self._lines = Paced(seconds_between_lines, clock=clock)
        self._withheld: str | None = None
        self._figures: Mapping[str, float] = {}
        self._note = ""
        self._bar: Any = None
        self._curves: NotebookBar | None = None
        self._doing = ""
        if notebook:
            self._bar = self._curves = NotebookBar(total, initial=initial, clock=clock)
            bar_opened(self._bar)
        elif is_terminal(self._stream):
            self._bar = _open_bar(total=total, initial=initial, desc=desc, file=self._stream)
            bar_opened(self._bar)

    @property
    def draws_bar(self) -> bool:
        """Whether a bar is on the terminal, or in the notebook."""
        return self._bar is not None

    def update(self, step: int) -> None:
        """Say that `step` steps of the whole run are done.

        Args:
            step: The count itself, not what was added to it.
        """
        if self._bar is not None:
            self._bar.update(step - self.step)
        self.step = step

    def doing(self, what: str) -> None:
        """Show an activity other than steps on the bar, such as `val 12` or `checkpoint`; nothing is written elsewhere.

        Args:
            what: In a few words; an empty text when it is over.
        """
        if self._bar is None:
            return
        # What changes with every batch is drawn as often as the bar itself, what begins and ends at once.
        begins_or_ends = what.split(" ")[0] != self._doing.split(" ")[0]
        self._doing = what
        self._bar.set_description_str(self._description(), refresh=begins_or_ends)
        if not begins_or_ends:
            self._bar.update(0)

    def set_epoch(self, epoch: str) -> None:
        """Show another text behind the name, such as `epoch 2/5`."""
        if epoch != self.epoch:
            self.epoch = epoch
            if self._bar is not None:
                self._bar.set_description_str(self._description(), refresh=True)

    def _description(self) -> str:
        """Return the text before the bar, shortened to leave room for it."""
        room = math.inf
        if self._curves is None:
            with suppress(OSError, ValueError):
                columns = os.get_terminal_size(self._stream.fileno()).columns
                room = columns - _BESIDE_BAR - 2 * len(str(self.total or self.step)) - _NARROWEST_BAR
        doing, figures = f"[{self._doing}]" if self._doing else "", list(self._figures.items())
        whole = _joined(self.desc, self.epoch, doing, figures=figures)
        if self._note and len(whole) + 2 + len(self._note) <= room:
            return f"{whole}  {self._note}"
        # The name gives way first, then one metric after the other from the last on.
        text = whole
        for count in range(len(figures), 0, -1):
            if len(text) <= room:
                break
            text = _joined(self.epoch, doing, figures=figures[:count])
        return text

    def show(self, step: int, values: Mapping[str, float], *, speed: str = "", note: str = "") -> None:
        """Show metrics at `step`: on the bar, and as a line of the log when one is due.

        Args:
            step: As for `update`.
            values: Metrics by name.
            speed: Speed in a few words, such as `5.1k samples/s`; steps a second without.
            note: What else there is to say, behind everything else.
        """
        self.update(step)
        self._figures, self._note = dict(values), note
        if self._bar is not None:
            self._bar.set_description_str(self._description(), refresh=False)
        line = "  ".join(part for part in (self.line(format_scores(values), speed), note) if part)
        if self._lines.due():
            self._write(line)
        else:
            self._withheld = line

    def curve(self, step: int, result: Mapping[str, Mapping[str, float]]) -> None:
        """Add points to the curves of a notebook; there are none elsewhere.

        Args:
            step: Step of the whole run that they belong to.
            result: Metrics by split.
        """
        if self._curves is not None:
            self._curves.curve(step, result)

    def write_last(self) -> None:
        """Write the line of the last metrics, if it was withheld: only the end follows."""
        if self._withheld is not None:
            self._write(self._withheld)

    def forget_last(self) -> None:
        """Leave out a line that was withheld: later metrics have been said."""
        self._withheld = None

    def _write(self, line: str) -> None:
        self._withheld = None
        logger.info("%s", line, extra={SHOWN_ON_BAR: True})

    def line(self, figures: str = "", speed: str = "") -> str:
        """Return the state as one plain line: name, steps, share, metrics, speed and time left."""
        share = f"/{self.total} ({100 * self.step / self.total:.0f}%)" if self.total else ""
        head = f"{self.desc or 'step'}{f' {self.epoch}' if self.epoch else ''} {self.step}{share}"
        done, elapsed = self.step - self.initial, self._clock() - self._started
        pace = speed
        if done > 0 and elapsed > 0:
            pace = pace or f"{format_count(done / elapsed)} steps/s"
            if self.total:
                pace += f", {format_duration(elapsed / done * (self.total - self.step))} left"
        return "  ".join(part for part in (head, figures, pace) if part)

    def close(self) -> None:
        """Write the last line and draw the bar a last time, and let go of the terminal. A second call does nothing."""
        self.write_last()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar_closed(bar)
            bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(*head: str, figures: Sequence[tuple[str, float]]) -> str:
    return "  ".join(part for part in (" ".join(filter(None, head)), format_scores(dict(figures))) if part)


def is_terminal(stream: Any) -> bool:
    """Return whether a bar can be drawn on `stream`: a terminal that knows its width."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty()) and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):
        return False


def format_scores(values: Mapping[str, Any]) -> str:
    """Return metrics as one short text, in their order.

    Args:
        values: Metrics by name, or such mappings by split.

    Examples:
        >>> format_scores({"loss": 0.12345, "accuracy": 0.95})
        'loss 0.1235  accuracy 0.9500'
        >>> format_scores({"train": {"loss": 0.5}, "val": {"loss": 1e-5}})
        'train: loss 0.5000 | val: loss 1.000e-05'
        >>> format_scores({"loss": 0.5, "samples": 160.0})
        'loss 0.5000  (160 samples)'
    """
    if values and all(isinstance(value, Mapping) for value in values.values()):
        return " | ".join(f"{split}: {format_scores(figures)}" for split, figures in values.items())
    shown = [f"{name} {format_number(value)}" for name, value in values.items() if name != "samples"]
    return "  ".join(shown + ([f"({values['samples']:.0f} samples)"] if "samples" in values else []))


def format_number(value: float) -> str:
    """Return a number with four decimals, in scientific notation where it is very small or large."""
    if isinstance(value, int):
        return str(value)
    value = float(value)
    plain = not math.isfinite(value) or value == 0 or 1e-2 <= abs(value) < 1e5
    return f"{value:.4f}" if plain else f"{value:.3e}"


def format_duration(seconds: float) -> str:
    """Return a duration as `[d day(s), ]h:mm:ss`, without fractions."""
    return str(timedelta(seconds=round(max(seconds, 0.0))))


def _open_bar(**settings: Any) -> object:
    from tqdm import tqdm

    class QuietBar(tqdm):  # type: ignore[type-arg]
        """A bar without tqdm's monitor thread and its lock between processes, neither of which survives a fork well."""

        monitor_interval = 0

    QuietBar.set_lock(threading.RLock())
    return QuietBar(dynamic_ncols=True, bar_format=_BAR, **settings)


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
        """Set the lines above the bar."""
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
        """Return a context in which other code may write; in a notebook its lines appear below the bar."""
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
