"""Lines on the terminal that leave an open progress bar intact, without a patched `print`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TextIO

_open_bars: list[Bar] = []


class Bar(Protocol):
    """A drawn progress bar that can step aside while somebody else writes."""

    def external_write_mode(self, file: TextIO | None = None, nolock: bool = False) -> AbstractContextManager[object]:
        """Return a context in which the bar is cleared; it is drawn again afterwards."""
        ...


def bar_opened(bar: Bar) -> None:
    """Register a bar that is drawn from now on."""
    _open_bars.append(bar)


def bar_closed(bar: Bar) -> None:
    """Forget a bar; one that is not registered is ignored."""
    if bar in _open_bars:
        _open_bars.remove(bar)


def bar_is_open() -> bool:
    """Return whether a bar is drawn on the terminal at the moment."""
    return bool(_open_bars)


def beside_bar(stream: TextIO) -> AbstractContextManager[object]:
    """Return a context in which `stream` can be written without tearing an open bar."""
    return _open_bars[-1].external_write_mode(file=stream) if _open_bars else nullcontext()


class Printer:
    """A `print` that speaks on one process only and does not tear the progress bar.

    Args:
        enabled: Whether this process speaks; usually the main one does.

    Examples:
        >>> say = Printer(enabled=rank == 0)  # doctest: +SKIP
        >>> say("loss", 0.5)  # doctest: +SKIP
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def __call__(
        self, *values: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        """Print as the builtin does, with its arguments; silent when not enabled."""
        if not self.enabled:
            return
        stream = file if file is not None else sys.stdout
        with beside_bar(stream):
            print(*values, sep=sep, end=end, file=stream, flush=flush)
