"""Randomness of an iterable dataset as a function of (seed, split, pass, worker, item)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast
from zlib import crc32

from torch.utils.data import IterableDataset, get_worker_info

from .generators import Generators, generator_state
from .plain_state import from_plain, is_stateful, to_plain
from .randomness import derive_seed, mix_seed, seed_host_streams
from .replayed import Replayed, apart, draws_of_groups
from .user_loader import fingerprint, say_order_differs
from .workers import WorkersView

logger = logging.getLogger("danling")

_NO_STATE = "Give it, or the iterator that it returns, state_dict and load_state_dict."
_GROUPS = (
    "It draws random numbers and makes rows in groups (batched=True), of which a part cannot be made again alone. Draw in the "
    "collate_fn to go on at once."
)
_OF_EARLIER_VERSION = (
    "It makes rows in groups (batched=True), and the checkpoint is of an earlier version, which did not note whether random numbers were "
    "drawn for them. Later checkpoints do."
)


class KeyedStream(WorkersView, IterableDataset[Any]):
    """An iterable dataset before each of whose batches all randomness is seeded.

    torch's CPU generator, NumPy, `random`, and the generators that the dataset or `collate_fn` holds are seeded with (seed, split, pass,
    worker, item). All ranks draw alike, so that a dataset which draws one order and lets each rank take its part does; a
    generator that it holds is told apart by the state in which it was handed over, which may be of the rank.

    Args:
        dataset: The dataset.
        seed: Base seed.
        split: Name of the split.
        epoch: The pass.
        every: Items between two seedings, those of a batch.
        collate_fn: The user's, or `None`.
        origins: What tells each generator apart, by path.
        speaks: Whether to say that items are read again.
    """

    def __init__(
        self,
        dataset: object,
        seed: int,
        *,
        split: str,
        epoch: int,
        every: int,
        collate_fn: object = None,
        origins: Mapping[str, int] | None = None,
        speaks: bool = True,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.split = split
        self.epoch = epoch
        self.every = every
        self.collate_fn = collate_fn
        self.origins = dict(origins or {})
        self.speaks = speaks

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self)


class StreamIterator:
    """Iterates over a `KeyedStream`; its state is that of the dataset or its iterator, or the number of items."""

    def __init__(self, stream: KeyedStream) -> None:
        self.stream = stream
        info = get_worker_info()
        self._worker = info.id if info is not None else 0
        self._base = derive_seed(stream.seed, "stream", stream.split, stream.epoch, self._worker)
        self._draws = draws_of_groups(stream.dataset)
        self._dataset: Any = stream.dataset if self._draws is None else apart(stream.dataset)
        self._iterator: Iterator[Any] | None = None
        self._generators: Generators | None = None
        self._items = 0
        self._over = False
        self._why_again = _NO_STATE if self._draws is None else _GROUPS
        self._positioned = is_stateful(self._dataset)
        self._last: int | None = None
        """Fingerprint of the last items of all batches so far, where what was read will be read again."""

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> object:
        """Return the next item."""
        if self._over:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._begin()
        if self._items % self.stream.every == 0:
            self._seed(self._items)
        try:
            item = next(self._iterator)
        except StopIteration:
            self._over = True
            self._look_for_draws()
            raise
        self._items += 1
        if self._items % self.stream.every == 0:
            self._look_for_draws()
            if not self._positioned:
                self._last = fingerprint(item, self._last)
        return item

    def _begin(self) -> Iterator[object]:
        self._seed(0)
        iterator: Iterator[object] = iter(self._dataset)
        self._positioned = self._positioned or is_stateful(iterator)
        return iterator

    def _seed(self, item: int) -> None:
        if self._generators is None:
            self._generators = stream_generators(self.stream.dataset, self.stream.collate_fn)
        elif self._generators.changed():
            self._generators.look_again()
        seed = mix_seed(self._base, item)
        self._generators.seed(seed, self.stream.origins)
        seed_host_streams(seed)
        if self._draws is not None:
            self._draws.begin(self._generators)

    def _look_for_draws(self) -> None:
        # Before a batch is made of the items, whose random numbers are keyed whatever was read before.
        if self._draws is not None and self._generators is not None:
            self._draws.end(self._generators)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items, and the state of the dataset or its iterator where they have one that is enough to go on from."""
        dataset, iterator = self._dataset, self._iterator
        enough = self._draws is None or not self._draws.seen
        held = enough and iterator is not dataset and is_stateful(dataset)
        last = {} if self._last is None else {"last": self._last}
        state: dict[str, Any] = {
            **last,
            "items": self._items,
            "over": self._over,
            "epoch": self.stream.epoch,
            "dataset": to_plain(dataset.state_dict()) if held else None,
            "iterator": to_plain(cast(Any, iterator).state_dict()) if enough and is_stateful(iterator) else None,
        }
        return state if self._draws is None else {**state, "draws": self._draws.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; without a state of the dataset's, what was read is read again and dropped."""
        dataset, iterator = state["dataset"], state["iterator"]
        if dataset is not None and isinstance(self.stream.dataset, Replayed):
            # Saved by a version that took the state of a dataset with a shuffle buffer, which forgets what the buffer holds. The pass
            # is read again without the wrapper `Replayed`, as it was then: a generator is seeded by its path of attributes.
            self.stream = copy.copy(self.stream)
            self._dataset = self.stream.dataset = self.stream.dataset.dataset
            dataset = None
        if dataset is not None and self._draws is not None and "draws" not in state:
            # Saved by a version that did not watch for draws: where there were some, the state of the dataset is not enough.
            dataset, self._why_again = None, _OF_EARLIER_VERSION
        if dataset is not None:
            self._dataset.load_state_dict(from_plain(dataset))
        if state["over"]:
            # A dataset may stand at its beginning again by then, and torchdata's workers ask once more.
            self._over = True
            return
        if dataset is None and iterator is None:
            self._read_again(state)
            return
        if not state["items"] and iterator is None:
            return
        self._iterator = self._begin()
        if iterator is not None:
            cast(Any, self._iterator).load_state_dict(from_plain(iterator))
        self._items = state["items"]
        self._seed(self._items - self._items % self.stream.every)

    def _read_again(self, state: Mapping[str, Any]) -> None:
        if state["epoch"] != self.stream.epoch:
            self._over = bool(state["items"])
            return
        if state["items"] and self.stream.speaks and self._worker == 0:
            logger.warning(
                "The dataset of split %r (%s) cannot be positioned: its first %d items of epoch %d are read again and dropped. %s",
                self.stream.split,
                type(self.stream.dataset).__name__,
                state["items"],
                state["epoch"],
                self._why_again,
            )
        for _ in range(state["items"]):
            next(self)
        if self.stream.speaks and self._worker == 0 and self._last != state.get("last", self._last):
            say_order_differs(self.stream.split, self.stream.dataset, state["items"])


def stream_generators(dataset: object, collate_fn: object = None) -> Generators:
    """Return the generators that reading an iterable dataset draws from."""
    roots = {"dataset": dataset}
    return Generators(roots if collate_fn is None else {**roots, "collate_fn": collate_fn})


def generator_origins(dataset: object, collate_fn: object = None) -> dict[str, int]:
    """Return a number for the state of each generator, by path, that tells apart those that ranks seed differently."""
    found = stream_generators(dataset, collate_fn)
    return {place.path: crc32(_text(generator_state(place.current()))) for place in found.places}


def _text(state: object) -> bytes:
    if hasattr(state, "tolist"):
        return repr(state.tolist()).encode()
    if isinstance(state, Mapping):
        return b"".join(str(key).encode() + _text(state[key]) for key in sorted(state))
    return repr(state).encode()
