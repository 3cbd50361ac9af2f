"""How far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("danling")


def format_scores(values: Mapping[str, float]) -> str:
    """Return figures as `name 1.234` with four significant digits, in their order."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


class Progress:
    """A bar over the updates of a run.

    Args:
        total: Updates of the run, `None` when unknown.
        initial: Updates made before.
        desc: Label.
    """

    def __init__(self, *, total: int | None, initial: int = 0, desc: str = "") -> None:
        self.total = total
        self._bar: Any = None
        self.shows_bar = sys.stderr.isatty()
        if self.shows_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=initial, desc=desc, dynamic_ncols=True, file=sys.stderr, smoothing=0.05)

    def update(self, step: int) -> None:
        """Move to `step`."""
        bar = self._bar
        if bar is not None and step > bar.n:
            bar.update(step - bar.n)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show figures behind the bar, or as a line of the log."""
        if self._bar is not None:
            self._bar.set_postfix_str(format_scores({name.rpartition("/")[2]: value for name, value in values.items()}))
            return
        of = f"/{self.total}" if self.total else ""
        logger.info("step %d%s: %s", step, of, format_scores(values))

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._bar is None:
            print(*values, **kwargs)
            return
        self._bar.clear()
        print(*values, **kwargs)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
