"""Randomness of a sample as a function of (seed, epoch, index), whoever reads it and in whatever order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from .dataset_state import parts_of, set_states, stateful_parts
from .generators import Generators
from .host_streams import HOST_STREAMS
from .randomness import derive_seed, mix_seed
from .reading_code import may_look_at_streams
from .workers import WorkersView

T = TypeVar("T")

ALL_STREAMS = tuple(range(len(HOST_STREAMS.all)))
"""The streams of the process by their places in `HOST_STREAMS`."""

Family = int | tuple[int, int]
"""Epoch, or (epoch, how manieth reading), of samples that a sampler draws again within an epoch."""
Key = tuple[Family, Any]
"""(epoch, index) of a sample. The index is an integer, unless a sampler of the user's names samples otherwise."""


_index_of = operator.itemgetter(1)


class KeyedDataset(WorkersView, Dataset[Any]):
    """A map-style dataset whose items are asked for by (epoch, index), with all randomness seeded for each.

    Before an item is read, torch's CPU generator, NumPy, `random`, and the generators that the dataset or `collate_fn` holds at any depth
    are seeded with (seed, epoch, index). Augmentation that draws from them gives the same sample in any worker, in any
    batch, and when a run is resumed. CUDA's global stream is left alone. A dataset with `__getitems__` reads a batch at
    once and is seeded by its first index.

    A generator that is made while items are read was seeded from what this process read first; the batch in which it
    appears is read once more, with it keyed.

    The streams are left where the last item left them, so a `collate_fn` that draws is keyed by the batch.

    Args:
        dataset: The dataset, with items by integer.
        seed: Base seed.
        collates: The batch goes through a `collate_fn` of the user's, which may draw.
        collate_fn: That function, for generators that it holds.
        states: States that the dataset has in the workers of a resumed run, by worker and path.
    """

    def __init__(
        self,
        dataset: object,
        seed: int,
        *,
        collates: bool = False,
        collate_fn: object = None,
        states: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.quiet = draws_nothing(dataset)
        self.reads_batches = reads_batches(dataset)
        self.seeds_batch = self.quiet and collates
        self._roots = reading_roots(dataset, collate_fn if collates else None)
        self._generators: Generators | None = None
        self._holders = 0
        self._looks_at_streams = False
        self._states = dict(states or {})
        self._family: Family = -1
        self._base = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, object]:
        # A worker looks for the generators of its own copy.
        return {**self.__dict__, "_generators": None}

    def __getitem__(self, key: Key) -> Any:
        """Return the item of one key, its randomness seeded."""
        return self.settled(lambda: self.read([key], True))

    def __getitems__(self, keys: Sequence[Key]) -> object:
        """Return the items of a batch of keys of one epoch."""
        # Of most datasets nobody keeps a state, nor a generator.
        return self.settled(lambda: self.read(keys, False)) if self._states or self._roots else self.read(keys, False)

    def settled(self, read: Callable[[], T]) -> T:
        """Return what is read of a batch once all generators that it draws from are known: those that it brings about are keyed too.

        Args:
            read: Reads the batch.
        """
        self._prepare()
        data = read()
        while self._found_generators():
            data = read()
        return data

    # The steps of reading

    def _prepare(self) -> None:
        """Look for generators, and put the dataset of a worker into the state that it has there, before the first batch."""
        if self._states:
            self._take_over_state()
        if self._generators is None and self._roots:
            self._generators = Generators(self._roots)
            self._look_at_code()

    @property
    def has_own_randomness(self) -> bool:
        """Whether there are generators, or reading may look at a stream without moving it."""
        return self._looks_at_streams or bool(self._generators)

    def _found_generators(self) -> bool:
        """Return whether reading has brought about generators, or objects that may make some: then what was read is not keyed."""
        if self._generators is None or not self._generators.changed():
            return False
        found, looked = self._generators.look_again(), self._looks_at_streams
        self._look_at_code()
        return found or self._looks_at_streams > looked

    def parts(self, keys: Sequence[Key], single: bool) -> list[Sequence[Key]]:
        """Return the keys of a batch in the parts that are seeded by their first key and read at once."""
        whole = single or self.quiet or self.reads_batches
        return [keys] if whole else [[key] for key in keys]

    def seed_for(self, key: Key, streams: Sequence[int] = ALL_STREAMS) -> None:
        """Seed streams, and all generators, for a key.

        Args:
            key: That of the part.
            streams: Which ones, by their places.
        """
        family, index = key
        if family != self._family:
            parts = family if isinstance(family, tuple) else (family,)
            self._family, self._base = family, derive_seed(self.seed, "sample", *parts)
        seed = mix_seed(self._base, index if type(index) is int else index_number(index))
        if self._generators:
            self._generators.seed(seed)
        for number in streams:
            HOST_STREAMS.all[number].seed(seed)

    def read(self, keys: Sequence[Key], single: bool, streams: Sequence[int] = ALL_STREAMS) -> Any:
        """Return what is read of a batch of keys, or of a single one.

        Args:
            keys: The keys.
            single: There is one, and its item is asked for.
            streams: Those that are seeded for each part.

        Raises:
            RuntimeError: If an item raises StopIteration, with which a pass would end in silence.
        """
        try:
            return self._items(keys, single, streams)
        except StopIteration as error:
            raise RuntimeError(
                "Expected a dataset that has an item at each index below its length. Received: StopIteration from one of the items "
                f"{[index for _, index in keys]}. Mend its __getitem__, or shorten its __len__."
            ) from error

    def _items(self, keys: Sequence[Key], single: bool, streams: Sequence[int]) -> Any:
        dataset = self.dataset
        seeds = bool(streams or self._generators) and (not self.quiet or self.seeds_batch)
        if seeds and (single or self.quiet or self.reads_batches):
            self.seed_for(keys[0], streams)
        if single:
            return dataset[keys[0][1]]
        if self.reads_batches:
            return dataset.__getitems__(list(map(_index_of, keys)))
        if not seeds or self.quiet:
            return [dataset[index] for _, index in keys]
        items = []
        for key in keys:
            self.seed_for(key, streams)
            items.append(dataset[key[1]])
        return items

    def _take_over_state(self) -> None:
        info = get_worker_info()
        if info is not None and info.id in self._states:
            set_states(stateful_parts(self.dataset), self._states[info.id])
        self._states = {}

    def _look_at_code(self) -> None:
        assert self._generators is not None
        if self._holders != len(self._generators.holders):
            self._holders = len(self._generators.holders)
            # An iterator goes on where it is: a batch must not be read twice.
            moves_on = bool(self._generators.uncontrollable)
            self._looks_at_streams = self._looks_at_streams or moves_on or may_look_at_streams(self._roots)


def reading_roots(dataset: object, collate_fn: object = None) -> dict[str, object]:
    """Return what may hold generators that reading draws from, by name: the dataset, and a `collate_fn`."""
    roots = {} if draws_nothing(dataset) else {"dataset": dataset}
    return roots if collate_fn is None else {**roots, "collate_fn": collate_fn}


def index_number(index: Any) -> int:
    """Return an integer for what a sampler names a sample by: the index itself, or a number of 63 bits made from it."""
    try:
        return operator.index(index)
    except TypeError:
        return derive_seed(repr(index))


def reads_batches(dataset: object) -> bool:
    """Return whether the dataset reads a batch at once, by `__getitems__`.

    A `Subset` has one that only loops: unless what it is a part of reads batches, its items are asked for, and seeded,
    one by one.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return callable(getattr(inner, "__getitems__", None)) and callable(getattr(dataset, "__getitems__", None))


def draws_nothing(dataset: object) -> bool:
    """Return whether the dataset is known to draw no random numbers, or says so. Subclasses may, so types are compared exactly."""
    if own_word(dataset) is False:
        return True
    parts = parts_of(dataset)
    if parts is not None:
        return all(map(draws_nothing, parts.values()))
    return type(dataset) in (TensorDataset, list, tuple, range, Tensor)


def declared_draws(dataset: object) -> bool | None:
    """Return what a dataset says by `draws_random`, or one that torch's wrappers hold; `None` where none says `True` or all say nothing."""
    said = own_word(dataset)
    if said is not None:
        return said
    return True if True in map(declared_draws, (parts_of(dataset) or {}).values()) else None


def own_word(dataset: object) -> bool | None:
    """Return the attribute `draws_random` of a dataset, `None` where there is none.

    Raises:
        ValueError: If it is neither `True` nor `False`.
    """
    said = getattr(dataset, "draws_random", None)
    if said is None or isinstance(said, bool):
        return said
    raise ValueError(
        f"Expected {type(dataset).__name__}.draws_random to be True or False. Received: draws_random={said!r} "
        f"({type(said).__name__}). Say whether reading a sample draws random numbers, or leave it out."
    )
