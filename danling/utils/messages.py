"""What people read: tables, numbers, hints, warnings, and how often to write them."""

from __future__ import annotations

import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches

_INSIDE = ("danling", "chanfig")
_CONTROLS = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
_IN_OUTPUT = re.compile(f"[{_CONTROLS}]")
_IN_VALUE = re.compile(f"[{_CONTROLS}\\t\\n]")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn, and attribute the warning to the nearest caller outside this library: Python shows a `DeprecationWarning` only there."""
    frame, level = sys._getframe(1), 2
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option closest to `name`, or `None` when nothing is close."""
    by_lower = {option.lower(): option for option in options}
    plain = name.lower()
    matches = get_close_matches(plain, by_lower, n=1)
    # Short words that differ in the order of their letters, such as `rl` and `lr`, are not alike enough for difflib.
    matches += [option for option in by_lower if sorted(option) == sorted(plain)]
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest option, or an empty string."""
    match = nearest(name, options)
    return f" Did you mean {match!r}?" if match else ""


def name_of_code(key: str, text: str, where: str = "") -> str:
    """Return the error for a name where an object of the program is needed: a file or a checkpoint keeps only that of a function."""
    last = key.rpartition(".")[2]
    return (
        f"Expected {key}{where} to be a function or an object. Received: the text {text!r}. Files and checkpoints hold no code, only "
        f"such a name. Set the object itself in the program: `self.config.{key} = {last}` in `__init__` of the runner, or over the "
        f"stored settings, `from_checkpoint(path, {{{key!r}: {last}}})`."
    )


_COMMA = re.compile(r"([-+]?\d+),(\d+([eE][-+]?\d+)?)")
_PERCENT = re.compile(r"([-+]?\d+(?:\.\d+)?) ?%")


def number_hint(value: object) -> str:
    """Return how to write a number that text means, with a blank before it; empty for other text."""
    text = value.strip() if isinstance(value, str) else ""
    comma, percent = _COMMA.fullmatch(text), _PERCENT.fullmatch(text)
    if comma is not None:
        return f" Write {comma[1]}.{comma[2]}, with a point."
    return f" Write {float(percent[1]) / 100:g}, as a share of 1." if percent is not None else ""


def clause(error: object) -> str:
    """Return the text of an error for a sentence that goes on behind it: without the full stop that errors of this library end with."""
    return str(error).rstrip(".")


class Paced:
    """Says whether a line is due: the first ones are, then one in so many seconds."""

    def __init__(
        self, seconds: float, *, burst: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = seconds
        self._left = burst
        self._clock = clock
        self._next = -math.inf

    def due(self) -> bool:
        """Return whether a line may be written now, and count it if so."""
        now = self._clock()
        if self._left <= 0 and now < self._next:
            return False
        self._left -= 1
        self._next = now + self.seconds
        return True


def format_count(value: float) -> str:
    """Return a number as people write it: three digits, with `k`, `M`, `G` or `T` for large ones.

    Examples:
        >>> [format_count(value) for value in (0.4567, 12, 735.3, 5123, 19_210, 2.5e9)]
        ['0.457', '12', '735', '5.1k', '19k', '2.5G']
    """
    for exponent, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        # Three digits of 999.6 are 1e+03.
        if abs(value) >= 0.9995 * 10**exponent:
            scaled = value / 10**exponent
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    return f"{value:.3g}"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table, whose columns line up; numbers are set right."""
    cells = [[as_text(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(head)]
    right = [
        bool(rows) and all(v is None or is_number(v) for v in (row[i] for row in rows))
        for i in range(len(head))
    ]
    for line in ([*head], *cells):
        fitted = (
            text.rjust(width) if set_right else text.ljust(width)
            for text, width, set_right in zip(line, widths, right)
        )
        yield "  ".join(fitted).rstrip()


def as_text(value: object) -> str:
    """Return a value as people read it on one line: five digits of a float, `-` for nothing, control characters escaped."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else _IN_VALUE.sub(_escape, str(value))


def without_controls(text: str) -> str:
    """Return lines of text in which control characters are escaped: names in files of others could steer a terminal."""
    return _IN_OUTPUT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return repr(found.group())[1:-1]


def is_number(value: object) -> bool:
    """Whether a value is a number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def first_of(names: Sequence[object], most: int) -> str:
    """Return the first names as text, with dots behind them if there are more."""
    shown = [*map(str, names[:most])]
    return ", ".join([*shown, "..."] if len(names) > most else shown)


def ranks_named(ranks: Sequence[int]) -> str:
    """Return the first eight of some ranks as text, such as `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, 8)}"


def listed(names: Sequence[str]) -> str:
    """Return the first five names as text, with the total number if there are more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"
