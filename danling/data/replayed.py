"""Streams of `datasets` with a shuffle buffer: their own state leaves out what the buffer holds, so they are read again instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Replayed(IterableDataset[Any]):
    """A stream without the state that it says it has: a resumed pass is read from its beginning up to the position.

    Args:
        dataset: The stream, whose order is a function of its seed and epoch.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Hand on the pass."""
        self.dataset.set_epoch(epoch)


def forgets_its_buffer(dataset: object) -> bool:
    """Whether a stream of `datasets` shuffles in a buffer, whose samples a load of its state drops.

    Args:
        dataset: Any dataset.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return False
    waiting, seen = [getattr(dataset, "_ex_iterable", None)], 0
    while waiting and seen < 1000:
        part, seen = waiting.pop(), seen + 1
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        waiting += [found for found in inner if found is not None]
    return False
