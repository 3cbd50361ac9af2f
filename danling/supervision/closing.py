"""Closes everything that a run has opened, in reverse order, exactly once."""

from __future__ import annotations

from contextlib import ExitStack


class Closers(ExitStack):
    """Closes what was opened, last opened first; if one of them fails, the others are closed all the same."""

    closed = False

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        if not self.closed:
            self.closed = True
            super().close()
