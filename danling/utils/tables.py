"""Tables as text, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
    """Return a value as people read it: five digits of a float, `-` for nothing."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def is_number(value: object) -> bool:
    """Whether a value is a number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
