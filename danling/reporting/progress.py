"""How far the run is: a bar on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from html import escape
from typing import Any, TextIO
from unicodedata import east_asian_width

from danling.utils.messages import Paced, format_count
from danling.utils.process import in_notebook

from .logging import SHOWN_ON_BAR, open_bars

logger = logging.getLogger("danling")

# As often as a person reads a number that changes.
SECONDS_BETWEEN_DRAWINGS = 0.3
_NARROWEST_BAR = 10


class Progress:
    """Progress towards a number of steps.

    On a terminal it draws a bar, metrics first. Where there is little room, the name gives way, and then one metric after the other from
    the last on, until ten columns are left for the bar. In a notebook the bar is the output of the cell. Elsewhere (a file, a pipe,
    CI) nothing is drawn, and `show` writes a line of the log, at most one in `seconds_between_lines`; the first and the last
    are always written.
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
        display: Callable[[str], Callable[[str], object]] | None = None,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.total, self.initial, self.desc = total, initial, desc
        self.step = initial
        self.epoch = ""
        """The text after the name, such as `epoch 2/5`."""
        self._clock = clock
        self._started = clock()
        self._drawn = -math.inf
        self._lines = Paced(seconds_between_lines, clock=clock)
        self._withheld: str | None = None
        self._figures: Mapping[str, float] = {}
        self._note = self._doing = ""
        if display is None and stream is None and in_notebook():
            display = _display
        self._replace = None if display is None else display(self.html())
        self.draws_bar = self._replace is not None or _is_terminal(self._stream)
        """Whether a bar is on the terminal, or in the notebook."""
        if self.draws_bar:
            open_bars.append(self)

    def update(self, step: int) -> None:
        """Say that `step` steps of the whole run are done."""
        self.step = step
        self.draw()

    def doing(self, what: str) -> None:
        """Show an activity other than steps on the bar, such as `val 12` or `checkpoint`; an empty text when it is over."""
        # What changes with every batch is drawn as often as the bar itself, what begins and ends at once.
        begins_or_ends = what.split(" ")[0] != self._doing.split(" ")[0]
        self._doing = what
        self.draw(at_once=begins_or_ends)

    def set_epoch(self, epoch: str) -> None:
        """Show another text behind the name, such as `epoch 2/5`."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.draw(at_once=True)

    def show(
        self, step: int, values: Mapping[str, float], *, speed: str = "", note: str = ""
    ) -> None:
        """Show metrics at `step`: on the bar, and as a line of the log when one is due.

        Args:
            step: As for `update`.
            values: Metrics by name.
            speed: Speed in a few words, such as `5.1k samples/s`; steps a second without.
            note: What else there is to say, behind everything else.
        """
        self._figures = dict(values)
        self._note = note
        self.update(step)
        share = f"/{self.total} ({100 * step / self.total:.0f}%)" if self.total else ""
        head = f"{' '.join(filter(None, (self.desc, self.epoch))) or 'step'} {step}{share}"
        seconds = self._seconds_a_step()
        if seconds:
            speed = speed or f"{format_count(1 / seconds)} steps/s"
            if self.total:
                speed += f", {format_duration(seconds * (self.total - step))} left"
        self._withheld = "  ".join(
            part for part in (head, format_scores(values), speed, note) if part
        )
        if self._lines.due():
            self.write_last()

    def write_last(self) -> None:
        """Write the line of the last metrics, if it was withheld: only the end follows."""
        line, self._withheld = self._withheld, None
        if line is not None:
            logger.info("%s", line, extra={SHOWN_ON_BAR: True})

    def forget_last(self) -> None:
        """Leave out a line that was withheld: later metrics have been said."""
        self._withheld = None

    def close(self) -> None:
        """Write the last line and draw the bar a last time, and let go of the terminal. A second call does nothing."""
        self.write_last()
        if self in open_bars:
            open_bars.remove(self)
            self.draw(at_once=True)
            if self._replace is None and self.draws_bar:
                with suppress(OSError, ValueError):
                    self._stream.write("\n")
                    self._stream.flush()
        self.draws_bar = False

    # Drawing

    def draw(self, *, at_once: bool = False) -> None:
        """Draw the bar where there is one, now and then or at once."""
        if not self.draws_bar:
            return
        now = self._clock()
        if not at_once and now - self._drawn < SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn = now
        if self._replace is not None:
            self._replace(self.html())
            return
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
            tail = f"  {self.step}/{self.total or '?'}{self._left()} |"
            text = self._description(columns - len(tail) - 1 - _NARROWEST_BAR)
            width = max(columns - _columns(text) - len(tail) - 1, _NARROWEST_BAR)
            done = round(width * min(self.step / self.total, 1.0)) if self.total else 0
            line = f"{text}{tail}{'#' * done}{' ' * (width - done)}|"
            while _columns(line) > columns:  # a line that wraps could not be erased
                line = line[:-1]
            self._stream.write(f"\x1b[2K\r{line}")
            self._stream.flush()
        except (OSError, ValueError):
            self.draws_bar = False  # the terminal is gone

    def erase(self) -> None:
        """Erase the bar from its terminal, so that something else can be written there."""
        if self._replace is None and self.draws_bar:
            with suppress(OSError, ValueError):
                self._stream.write("\x1b[2K\r")
                self._stream.flush()

    def _seconds_a_step(self) -> float:
        # Of this attempt: steps before a resume took no time of it.
        done = self.step - self.initial
        return (self._clock() - self._started) / done if done > 0 else 0.0

    def _left(self) -> str:
        """Return the text of the time that is left, behind the count of steps; empty where it is not known, and at the end."""
        seconds = self._seconds_a_step() * ((self.total or 0) - self.step)
        return f", {format_duration(seconds)} left" if seconds > 0 else ""

    def _description(self, room: float) -> str:
        """Return the text before the bar, shortened to leave room for it."""
        doing = f"[{self._doing}]" if self._doing else ""
        figures = list(self._figures.items())
        text = _joined(self.desc, self.epoch, doing, figures=figures)
        if self._note and _columns(f"{text}  {self._note}") <= room:
            return f"{text}  {self._note}"
        # The name gives way first, then one metric after the other from the last on.
        for count in range(len(figures), 0, -1):
            if _columns(text) <= room:
                break
            text = _joined(self.epoch, doing, figures=figures[:count])
        return text

    def html(self) -> str:
        """Return the bar, for a notebook."""
        count = str(self.step)
        bar = ""
        if self.total:
            count = f"{self.step}/{self.total}{self._left()}"
            bar = (
                f'<progress max="{self.total}" value="{self.step}" style="width: 20em"></progress> '
            )
        return (
            '<div style="font-family: monospace; font-size: 90%">'
            f"<div>{escape(self._description(math.inf))}</div><div>{bar}{count}</div></div>"
        )


def _joined(*head: str, figures: Sequence[tuple[str, float]]) -> str:
    return "  ".join(
        part for part in (" ".join(filter(None, head)), format_scores(dict(figures))) if part
    )


def _columns(text: str) -> int:
    """Return the columns that a text takes on a terminal: East Asian characters take two."""
    return sum(2 if east_asian_width(letter) in "FW" else 1 for letter in text)


def _is_terminal(stream: Any) -> bool:
    """Return whether a bar can be drawn on `stream`: a terminal that knows its width."""
    try:
        knows_width = stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):
        return False
    # A dumb terminal knows no escape codes, and could not erase the bar.
    return bool(knows_width) and os.environ.get("TERM") != "dumb"


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
    shown = [
        f"{name} {format_number(value)}" for name, value in values.items() if name != "samples"
    ]
    return "  ".join(
        shown + ([f"({values['samples']:.0f} samples)"] if "samples" in values else [])
    )


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


def _display(html: str) -> Callable[[str], object]:
    """Show HTML below the cell that runs, and return what replaces it."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(html), display_id=True)  # type: ignore[no-untyped-call]
    return lambda other: handle.update(HTML(other))  # type: ignore[no-untyped-call]
