"""Checks whether a training script of any library computes the same on several processes as on one: `danling prove`.

A script whose batches do not come from a `torch.utils.data.DataLoader` shows them by one line; outside of `danling prove` it does nothing:

    from danling import prove

    for batch in prove.batches(my_batches): ...

This module imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["batches"]

_T = TypeVar("_T")


def batches(iterable: Iterable[_T]) -> Iterable[_T]:
    """Let `danling prove` record the batches of an iterable, and replay them in one process. Call it on all ranks.

    Args:
        iterable: What the training loop iterates over. The batches of a `DataLoader` are recorded without this call.

    Returns:
        The iterable itself, unless `danling prove` has started the script.
    """
    if "DANLING_PROVE" not in os.environ or hasattr(iterable, "_get_iterator"):  # a DataLoader
        return iterable
    return _Batches(iterable)


class _Batches(Iterable[Any]):
    """An iterable whose batches the tape sees."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        attached = sys.modules.get("_danling_prove.attach")
        source = iter(self._iterable)
        return source if attached is None else attached.watched(source)

    def __next__(self) -> Any:
        # Of an iterator, which `next` may be called on directly.
        self._iterator = getattr(self, "_iterator", None) or iter(self)
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterable, name)
