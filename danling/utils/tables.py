"""Tables as text, for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_CONTROLS = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
_IN_OUTPUT = re.compile(f"[{_CONTROLS}]")
_IN_VALUE = re.compile(f"[{_CONTROLS}\\t\\n]")


def table_lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table, whose columns line up; numbers are set right."""
    cells = [[as_text(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(head)]
    right = [bool(rows) and all(v is None or is_number(v) for v in (row[i] for row in rows)) for i in range(len(head))]
    for line in ([*head], *cells):
        fitted = (
            text.rjust(width) if set_right else text.ljust(width) for text, width, set_right in zip(line, widths, right)
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
