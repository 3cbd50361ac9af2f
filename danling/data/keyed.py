"""Randomness of a sample as a function of (seed, epoch, index), whoever reads it and in whatever order."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, get_worker_info

from .dataset_state import set_states, stateful_parts
from .generators import Generators
from .randomness import derive_seed, mix_seed, seed_host_streams
from .workers import WorkersView

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
        dataset: Any,
        seed: int,
        *,
        collates: bool = False,
        collate_fn: Any = None,
        states: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.quiet = draws_nothing(dataset)
        self.reads_batches = reads_batches(dataset)
        self.seeds_batch = self.quiet and collates
        self._roots = reading_roots(dataset, collate_fn if collates else None)
        self._generators: Generators | None = None
        self._states = dict(states or {})
        self._family: Family = -1
        self._base = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A worker looks for the generators of its own copy.
        return {**self.__dict__, "_generators": None}

    def __getitem__(self, key: Key) -> Any:
        """Return the item of one key, its randomness seeded."""
        return self._read_settled([key], single=True)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the items of a batch of keys of one epoch."""
        # Of most datasets nobody keeps a state, nor a generator.
        return self._read_settled(keys) if self._states or self._roots else self._read(keys, False)

    def _take_over_state(self) -> None:
        info = get_worker_info()
        if info is not None and info.id in self._states:
            set_states(stateful_parts(self.dataset), self._states[info.id])
        self._states = {}

    def _read_settled(self, keys: Sequence[Key], *, single: bool = False) -> Any:
        if self._states:
            self._take_over_state()
        if not self._roots:
            return self._read(keys, single)
        if self._generators is None:
            self._generators = Generators(self._roots)
        data = self._read(keys, single)
        while self._generators.changed() and self._generators.look_again():
            data = self._read(keys, single)
        return data

    def _read(self, keys: Sequence[Key], single: bool) -> Any:
        dataset = self.dataset
        if single:
            if not self.quiet or self.seeds_batch:
                self._seed(*keys[0])
            return dataset[keys[0][1]]
        if self.quiet or self.reads_batches:
            if self.seeds_batch or not self.quiet:
                self._seed(*keys[0])
            indices = list(map(_index_of, keys))
            return (
                dataset.__getitems__(indices)
                if self.reads_batches
                else list(map(partial(operator.getitem, dataset), indices))
            )
        items = []
        for family, index in keys:
            self._seed(family, index)
            items.append(dataset[index])
        return items

    def _seed(self, family: Family, index: Any) -> None:
        if family != self._family:
            parts = family if isinstance(family, tuple) else (family,)
            self._family, self._base = family, derive_seed(self.seed, "sample", *parts)
        seed = mix_seed(self._base, index if type(index) is int else index_number(index))
        if self._generators:
            self._generators.seed(seed)
        seed_host_streams(seed)


def reading_roots(dataset: Any, collate_fn: Any = None) -> dict[str, Any]:
    """Return what may hold generators that reading draws from, by name: the dataset, and a `collate_fn`."""
    roots = {} if draws_nothing(dataset) else {"dataset": dataset}
    return roots if collate_fn is None else {**roots, "collate_fn": collate_fn}


def index_number(index: Any) -> int:
    """Return an integer for what a sampler names a sample by: the index itself, or a number of 63 bits made from it."""
    try:
        return operator.index(index)
    except TypeError:
        return derive_seed(repr(index))


def reads_batches(dataset: Any) -> bool:
    """Return whether the dataset reads a batch at once, by `__getitems__`.

    A `Subset` has one that only loops: unless what it is a part of reads batches, its items are asked for, and seeded,
    one by one.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return callable(getattr(inner, "__getitems__", None)) and callable(getattr(dataset, "__getitems__", None))


def draws_nothing(dataset: Any) -> bool:
    """Return whether the dataset is known to draw no random numbers. Subclasses may, so types are compared exactly."""
    kind = type(dataset)
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    if kind is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(draws_nothing(part) for part in parts)
    return kind in (TensorDataset, list, tuple, range, Tensor)
