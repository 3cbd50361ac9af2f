"""Randomness of a sample as a function of (seed, epoch, index), whoever reads it and in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from .randomness import derive_seed, mix_seed, seed_host_streams

Key = tuple[int, int]
"""(epoch, index) of a sample."""


class KeyedDataset(Dataset[Any]):
    """A map-style dataset whose items are asked for by (epoch, index), with the random streams seeded for each.

    Before an item is read, torch's CPU generator, NumPy and `random` are seeded with (seed, epoch, index). Augmentation
    that draws from them gives the same sample in any worker, in any batch, and when a run is resumed. Generators of the
    dataset's own, and CUDA's, are left alone. A dataset with `__getitems__` reads a batch at once and is seeded by its
    first index.

    The streams are left where the last item left them, so a `collate_fn` that draws is keyed by the batch.

    Args:
        dataset: The dataset, with items by integer.
        seed: Base seed.
        collates: The batch goes through a `collate_fn` of the user's, which may draw.
    """

    def __init__(self, dataset: Any, seed: int, *, collates: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.quiet = draws_nothing(dataset)
        self.reads_batches = reads_batches(dataset)
        self.seeds_batch = self.quiet and collates
        self._epoch = -1
        self._base = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        """Return the item of one key, its randomness seeded."""
        epoch, index = key
        if not self.quiet or self.seeds_batch:
            self._seed(epoch, index)
        return self.dataset[index]

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the items of a batch of keys of one epoch."""
        if self.quiet or self.reads_batches:
            if self.seeds_batch or not self.quiet:
                self._seed(*keys[0])
            indices = [index for _, index in keys]
            dataset = self.dataset
            return dataset.__getitems__(indices) if self.reads_batches else [dataset[index] for index in indices]
        return [self[key] for key in keys]

    def _seed(self, epoch: int, index: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._base = epoch, derive_seed(self.seed, "sample", epoch)
        seed_host_streams(mix_seed(self._base, index))


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
