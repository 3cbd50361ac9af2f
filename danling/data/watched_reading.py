"""Reading that seeds no stream which nothing draws from, and gives what reading with all of them seeded gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from .dataset_state import stateful_parts
from .host_streams import HOST_STREAMS, HostStream
from .keyed import Key, KeyedDataset, declared_draws
from .workers import WorkersView

logger = logging.getLogger("danling")


class SeenDraws:
    """What is known in this process of the streams that reading a dataset draws from.

    It outlives a pass. Workers begin with a copy, and learn for themselves.

    Attributes:
        streams: Those that are seeded for each sample; `None` before the first batch was read.
    """

    def __init__(self) -> None:
        self.streams: tuple[int, ...] | None = None

    def add(self, numbers: Sequence[int]) -> None:
        """Take note of streams that were drawn from, by their place among those of the process."""
        self.streams = tuple(sorted({*(self.streams or ()), *numbers}))


class WatchedReading(WorkersView, Dataset[Any]):
    """Reads what a `KeyedDataset` reads, and seeds only the streams that were ever seen to move.

    The first batch is read with every stream seeded for each sample, and which of them moves is noted. From then on only those are
    seeded. The others stand in states that no seed leads to: where one of them is found in another state after a batch, a sample has drawn
    from it or seeded it, so it is seeded from now on, and the batch is read again. Where none is, nothing that was read can depend on
    what a seed would have made of them.

    That does not hold for who makes numbers from the state of a stream, or generators of their own: a dataset whose code may do so, that
    holds generators or has a state, or that says `draws_random = True` is read with every stream seeded.

    The batch is made here too where the user has a `collate_fn`, which may draw: give the loader `as_is` instead.

    Args:
        keyed: What to read.
        collate_fn: The user's, which makes a batch of what was read; `None` leaves it to the loader.
        seen: What is known of it.
    """

    def __init__(self, keyed: KeyedDataset, collate_fn: Callable[[Any], Any] | None, seen: SeenDraws) -> None:
        self.dataset = keyed.dataset
        self.keyed = keyed
        self.collate_fn = collate_fn
        self.seen = seen
        self._may_watch = declared_draws(keyed.dataset) is not True and not stateful_parts(keyed.dataset)
        self._idle: list[tuple[int, HostStream]] = []
        self._idle_of: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.keyed)

    def __getitem__(self, key: Key) -> Any:
        """Return the item of one key."""
        return self.keyed.settled(lambda: self._read([key], True))

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the items of a batch of keys, or what the `collate_fn` makes of them."""
        return self.keyed.settled(lambda: self._read(keys, False))

    def _read(self, keys: Sequence[Key], single: bool) -> Any:
        if not keys or not self._may_watch or self.keyed.has_own_randomness:
            return self._collated(self.keyed.read(keys, single))
        if self.seen.streams is None:
            return self._read_observed(keys, single)[0]
        self._set_idle_apart()
        try:
            data = self._collated(self.keyed.read(keys, single, self.seen.streams))
        except Exception:
            # Numbers of a stream that was not seeded may be the reason.
            moved = self._note_idle_moves()
            if not moved:
                raise
        else:
            moved = self._note_idle_moves()
            if not moved:
                return data
        return self._read_again(keys, single, moved)

    def _read_again(self, keys: Sequence[Key], single: bool, moved: Sequence[int]) -> Any:
        """Read a batch in which streams have moved that were not seeded, with everything seeded."""
        data, drawn = self._read_observed(keys, single)
        if not drawn.intersection(moved):
            # What comes before the first draw depends on no stream, so it would have come to it again.
            self._may_watch = False
            logger.warning(
                "%s keeps what it draws at random: a batch that was read again, its streams seeded, drew nothing. Samples of this batch "
                "may differ in a run that resumes. Set draws_random = True on the dataset, and every sample is read once, seeded.",
                type(self.dataset).__name__,
            )
        return data

    def _set_idle_apart(self) -> None:
        """Put the streams that are not seeded into their private states."""
        if self._idle_of is not self.seen.streams:
            drawn = self._idle_of = self.seen.streams or ()
            self._idle = [(number, stream) for number, stream in enumerate(HOST_STREAMS.all) if number not in drawn]
        slow = [number for number, stream in self._idle if not stream.set_apart()]
        if slow:
            # Looking at such a stream takes longer than seeding it.
            self.seen.add(slow)
            self._set_idle_apart()

    def _note_idle_moves(self) -> list[int]:
        """Take note of idle streams that have moved, and return them."""
        moved = [number for number, stream in self._idle if stream.was_moved()]
        if moved:
            self.seen.add(moved)
        return moved

    def _read_observed(self, keys: Sequence[Key], single: bool) -> tuple[Any, set[int]]:
        """Read with everything seeded, and note what moves; return it too."""
        self.seen.add([])
        drawn: set[int] = set()
        parts = self.keyed.parts(keys, single)
        items: list[Any] = []
        for number, part in enumerate(parts):
            self.keyed.seed_for(part[0])
            states = HOST_STREAMS.save()
            read = self.keyed.read(part, single, ())
            last = number + 1 == len(parts)
            if last:
                items = self._collated(read if len(parts) == 1 else [*items, *read])
            else:
                items.extend(read)
            streams = zip(HOST_STREAMS.all, states, strict=True)
            drawn.update(place for place, (stream, state) in enumerate(streams) if stream.differs(state))
        self.seen.add(sorted(drawn))
        return items, drawn

    def __getstate__(self) -> dict[str, Any]:
        # Streams are those of a process.
        return {**self.__dict__, "_idle": [], "_idle_of": None}

    def _collated(self, data: object) -> Any:
        return data if self.collate_fn is None else self.collate_fn(data)


def as_is(data: object) -> Any:
    """Return a batch that is already made."""
    return data
