"""What a run has to close, in the order in which it is closed: once."""

from __future__ import annotations

from contextlib import ExitStack


class Closers(ExitStack):
    """Closes what was opened, the last one first; everything is closed also where something fails.

    Attributes:
        closed: Whether it was closed.
    """

    closed = False

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        if not self.closed:
            self.closed = True
            super().close()
