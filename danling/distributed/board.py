"""Notes that ranks leave for each other beside the training: no collective, and none of them has to be there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PATIENCE = timedelta(seconds=10)
"""How long one look may take: the process that keeps the store may be gone."""


class Board:
    """Notes in the store of a job, over a connection of its own: a thread that waits in the store does not hold it up.

    Nothing is raised where the store is gone: notes are lost then, and there are none.

    Args:
        store: Returns what all ranks share; see `default_store`.
        name: What the notes are about; another one for each training.
    """

    def __init__(self, store: Callable[[], Store], name: str) -> None:
        self._open = store
        self._name = f"danling/board/{name}"
        self._store: Store | None = None
        self.gone = False
        """Whether the store did not answer."""

    def write(self, key: str, text: str) -> None:
        """Leave a note, in the place of an earlier one.

        Args:
            key: What it is found by.
            text: The note.
        """
        try:
            self._connected().set(f"{self._name}/{key}", text)
        except RuntimeError:
            self.gone = True

    def read(self, key: str) -> str | None:
        """Return a note, `None` where there is none.

        Args:
            key: What it is found by.
        """
        name = f"{self._name}/{key}"
        try:
            store = self._connected()
            return store.get(name).decode() if store.check([name]) else None
        except RuntimeError:
            self.gone = True
            return None

    def is_first(self, key: str) -> bool:
        """Return whether this is the first call with a key on any rank; without a store every one is.

        Args:
            key: What there may be one of.
        """
        try:
            return self._connected().add(f"{self._name}/{key}", 1) == 1
        except RuntimeError:
            self.gone = True
            return True

    def _connected(self) -> Store:
        if self._store is None:
            # Of which torch's own description knows nothing.
            shared: Any = self._open()
            self._store = shared.clone()
            self._store.set_timeout(_PATIENCE)
        return self._store
