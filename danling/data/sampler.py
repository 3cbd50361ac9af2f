"""Which samples make which batch on which rank, as a function of (seed, epoch) and a position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .keyed import Key
from .randomness import derive_seed


class PositionedBatchSampler(Sampler[list[Key]]):
    """Batches of keys (epoch, index) of one rank, from any position of any epoch on.

    The order of an epoch is a permutation drawn from (seed, epoch), or the dataset's own order. It is cut into global
    batches of `batch_size * world_size` samples, of which rank r takes the r-th contiguous part. The position is the
    number of samples of the order that are consumed, over all ranks: it means the same for another batch size and
    another world size. Nothing before it is read.

    The last global batch may be ragged. It is divided as evenly as can be: sizes differ by at most one. A rank for
    which nothing is left gets no batch, or, with `pad`, one sample of weight zero, so that every rank makes the same
    number of updates.

    Args:
        length: Number of samples of the dataset.
        batch_size: Samples of a batch on each rank.
        shuffle: Permute the samples anew in each epoch.
        drop_last: Leave out a ragged global batch.
        pad: Give a padding sample to a rank for which nothing is left.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process among those that share the dataset.
        world_size: Number of them.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        pad: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"Expected 0 <= rank < world_size. Received: rank={rank}, world_size={world_size}.")
        self.length = length
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad = pad
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.consumed = 0

    @property
    def global_batch_size(self) -> int:
        """Samples of a full batch over all ranks."""
        return self.batch_size * self.world_size

    @property
    def even(self) -> bool:
        """Whether every rank gets the same number of batches in a pass from the position."""
        tail = self._tail(self.consumed)
        return self.pad or tail == 0 or tail >= self.world_size

    def __len__(self) -> int:
        """Return the number of batches of a whole pass on this rank."""
        return self.num_batches(0)

    def num_batches(self, consumed: int) -> int:
        """Return the number of batches on this rank from a position to the end of the pass."""
        tail = self._tail(consumed)
        return (self.length - consumed) // self.global_batch_size + (tail > 0 and self._tail_batch(tail) > 0)

    def position_after(self, consumed: int, batches: int) -> int:
        """Return the position when each rank has consumed `batches` more."""
        return min(consumed + batches * self.global_batch_size, self.length)

    def counts(self) -> Iterator[tuple[int, int]]:
        """Return (samples on this rank, over all ranks) of each batch from the position on; padding counts nothing."""
        full = repeat(
            (self.batch_size, self.global_batch_size), (self.length - self.consumed) // self.global_batch_size
        )
        tail = self._tail(self.consumed)
        if not tail or not self._tail_batch(tail):
            return full
        return chain(full, [(self._share(tail)[1], tail)])

    def __iter__(self) -> Iterator[list[Key]]:
        # Arguments are bound here, so that moving the position does not disturb an iterator that is under way.
        return self._batches(self.epoch, self.consumed)

    def _batches(self, epoch: int, start: int) -> Iterator[list[Key]]:
        order = self.order(epoch)
        while start + self.global_batch_size <= self.length:
            first = start + self.rank * self.batch_size
            yield self._keys(epoch, order, first, self.batch_size)
            start += self.global_batch_size
        tail = self._tail(start)
        if not tail:
            return
        offset, size = self._share(tail)
        if size:
            yield self._keys(epoch, order, start + offset, size)
        elif self.pad:
            yield self._keys(epoch, order, start, 1)

    def order(self, epoch: int) -> Tensor | range:
        """Return the indices of an epoch in the order in which the ranks together read them."""
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator)

    def _keys(self, epoch: int, order: Tensor | range, first: int, size: int) -> list[Key]:
        part = order[first : first + size]
        return list(zip(repeat(epoch), part.tolist() if isinstance(part, Tensor) else part, strict=False))

    def _tail(self, consumed: int) -> int:
        """Return the number of samples of the ragged global batch that ends a pass from a position on."""
        return 0 if self.drop_last else (self.length - consumed) % self.global_batch_size

    def _share(self, tail: int) -> tuple[int, int]:
        """Return offset and size of this rank's part of a ragged global batch."""
        size, larger = divmod(tail, self.world_size)
        return self.rank * size + min(self.rank, larger), size + (self.rank < larger)

    def _tail_batch(self, tail: int) -> int:
        """Return how many samples this rank reads of a ragged global batch, padding included."""
        return self._share(tail)[1] or int(self.pad)


class KeySampler(Sampler[Key]):
    """The keys of a `PositionedBatchSampler` of batch size 1, for a loader that does not collate."""

    def __init__(self, batches: PositionedBatchSampler) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Key]:
        return (keys[0] for keys in self.batches)
