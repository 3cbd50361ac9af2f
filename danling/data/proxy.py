"""Counting the batches of a loader that other ranks read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cursors import Batch
from .source import BatchSource


class Placeholder:
    """Takes the place of the data of a batch."""

    def __repr__(self) -> str:
        return "PLACEHOLDER"


PLACEHOLDER = Placeholder()
"""The data of a batch that this rank does not read."""


class ProxySource(BatchSource):
    """A source for a rank that reads no data: it yields placeholders, and its position follows that of the ranks that read.

    For a loader of the library, or of windows, the number of batches is known. The end of a user's loader is known only to the ranks that
    read it, so the proxy never ends by itself: the ranks have to agree on the end.
    """

    reads = False

    @property
    def even(self) -> bool:
        """Whether the number of batches is known here."""
        return self._cursor.foreseen and self._cursor.even

    def batches(self) -> Iterator[Batch]:
        """Return placeholders from the position on."""
        return self._cursor.unread(PLACEHOLDER)

    def commit(self, batches: Sequence[Batch]) -> None:
        """Move the position as the ranks do that read."""
        self._cursor.commit(len(batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the state of the loader itself is for the ranks that read it."""
        if self._cursor.foreseen:
            super().load_state_dict(state)
            return
        self._cursor.set_epoch(int(state["epoch"]))
        self._cursor.commit(int(state["consumed"]))
