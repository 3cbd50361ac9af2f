"""Streams of `datasets` whose own state leaves out what they hold, so that they are read again instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.utils.data import IterableDataset

from .generators import Generators
from .host_streams import HOST_STREAMS
from .plain_state import is_equal
from .reading_code import SUSPECTS


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


class Draws:
    """Whether reading a stream has drawn random numbers in this pass.

    Args:
        seen: Whether that is known from the beginning.
    """

    def __init__(self, *, seen: bool) -> None:
        self.seen = seen
        self._global: tuple[object, ...] = ()
        self._held: dict[str, Any] = {}

    def begin(self, generators: Generators) -> None:
        """Note how the streams stand before a batch, right after they were seeded.

        Args:
            generators: Those that the stream holds.
        """
        # What shows no generator cannot be compared.
        self.seen = self.seen or bool(generators.seeders)
        if not self.seen:
            self._global, self._held = HOST_STREAMS.save(), generators.states()

    def end(self, generators: Generators) -> None:
        """Look whether a stream has moved since `begin`; before anybody else draws.

        Args:
            generators: Those that the stream holds.
        """
        if not self.seen:
            moved = any(stream.differs(saved) for stream, saved in zip(HOST_STREAMS.all, self._global, strict=True))
            self.seen = moved or not is_equal(generators.states(), self._held)


def forgets_its_buffer(dataset: object) -> bool:
    """Whether a stream of `datasets` shuffles in a buffer, whose samples a load of its state drops.

    Args:
        dataset: Any dataset.
    """
    return any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in _parts(dataset))


def draws_of_groups(dataset: object) -> Draws | None:
    """Return what watches a stream of `datasets` that makes rows in groups, as `map(batched=True)` does; `None` for other data.

    A load of its state makes the group anew that the position lies in, which gives the same rows only where nothing draws.

    Args:
        dataset: Any dataset.
    """
    parts = list(_parts(dataset))
    if not any(getattr(part, "batched", False) for part in parts):
        return None
    functions = [inspect.unwrap(part.function) for part in parts if callable(getattr(part, "function", None))]
    # Numbers that a function makes of the seed of a stream do not move it.
    return Draws(seen=any(_names(getattr(function, "__code__", None)) & SUSPECTS for function in functions))


def apart(dataset: Any) -> Any:
    """Return a stream of `datasets` that loads states for itself.

    The stream never forgets what it was told to begin from: the same pass, read from its beginning later on, would begin there.

    Args:
        dataset: The stream.
    """
    # `copy.copy` would share the attributes, see its `__setstate__`.
    twin = object.__new__(type(dataset))
    vars(twin).update(vars(dataset))
    return twin


def _parts(dataset: object) -> Iterator[Any]:
    """Yield what a stream of `datasets` is put together of, nothing for other data."""
    of_datasets = type(dataset).__module__.startswith("datasets.")
    waiting, seen = [getattr(dataset, "_ex_iterable", None)] if of_datasets else [], 0
    while waiting and seen < 1000:
        part, seen = waiting.pop(), seen + 1
        yield part
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        waiting += [found for found in inner if found is not None]


def _names(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    return {*code.co_names}.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
