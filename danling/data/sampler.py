"""Which samples make which batch on which rank, as a function of (seed, epoch) and a position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, repeat

from torch.utils.data import Sampler

from .keyed import BatchKey
from .order import Order, epoch_order
from .randomness import derive_seed
from .shares import Division, WholeMicroBatches

_AHEAD = 1024
"""Samples whose order is computed at a time."""


class PositionedBatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of keys (epoch, index) of one rank, from any position of any epoch on.

    The order of an epoch is a permutation drawn from (seed, epoch), or the dataset's own order. It is cut into
    stretches, the samples of a global batch or of a whole update, which are divided over the ranks; see `Division`.
    The position is the number of samples of the order that are consumed, over all ranks: it means the same for another
    batch size and another world size. Nothing before it is read.

    The last stretch may be ragged; it is divided as evenly as can be. A rank for which nothing is left gets no batch,
    or, with `pad`, one sample of weight zero, so that every rank makes the same number of updates.

    Args:
        length: Number of samples of the dataset.
        batch_size: Samples of a batch on each rank; not read where `division` is given.
        division: How a stretch is divided; `None` makes global batches of `batch_size` samples on each rank. That of
            an update is always padded.
        shuffle: Permute the samples anew in each epoch.
        drop_last: Leave out a ragged stretch.
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
        division: Division | None = None,
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
        self.division = division or Division.of_batch(batch_size, world_size)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad = pad or self.division.is_update
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.consumed = 0

    @property
    def batch_size(self) -> int:
        """The most samples of a batch on this rank."""
        return self.division.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples of a full stretch over all ranks."""
        return self.division.samples

    @property
    def even(self) -> bool:
        """Whether every rank gets the same number of batches in a pass from the position."""
        tail = self._tail(self.consumed)
        return self.pad or tail == 0 or self.division.share(tail, self.world_size - 1)[1] > 0

    def __len__(self) -> int:
        """Return the number of batches of a whole pass on this rank."""
        return self.num_batches(0)

    def num_batches(self, consumed: int) -> int:
        """Return the number of batches on this rank from a position to the end of the pass."""
        full = (self.length - consumed) // self.division.samples
        return full * self.division.micro_batches + len(self._cut(self._tail(consumed)))

    def num_stretches(self, consumed: int) -> int:
        """Return the number of stretches from a position to the end of the pass."""
        return (self.length - consumed) // self.division.samples + (self._tail(consumed) > 0)

    @property
    def end(self) -> int:
        """Samples of a whole pass over all ranks: without a ragged stretch, where these are left out."""
        return self.length - self.length % self.division.samples if self.drop_last else self.length

    @property
    def next_stretch(self) -> int:
        """Samples of the stretch that begins at the position; 0 at the end of the pass."""
        return next(self._stretches(self.consumed), 0)

    def position_after(self, consumed: int, batches: int) -> int:
        """Return the position when each rank has consumed `batches` more.

        Raises:
            ValueError: If they are a part of an update only, which is divided as a whole.
        """
        stretches, rest = divmod(batches, self.division.micro_batches)
        left = (self.length - consumed) // self.division.samples
        if rest and self.division.is_update:
            tail = self.division.count((self.length - consumed) % self.division.samples)
            if (stretches, rest) != (left, tail):
                raise ValueError(
                    f"Expected the batches of whole updates, {self.division.micro_batches} of each rank. Received: "
                    f"{batches}. Move the position once an update is made."
                )
            return self.length
        return min(consumed + stretches * self.division.samples, self.length)

    def counts(self) -> Iterator[tuple[int, int]]:
        """Return (samples on this rank, over all ranks) of each batch from the position on; padding counts nothing."""
        full, whole = self.division.samples, self._counts(self.division.samples)
        tail = self._tail(self.consumed)
        stretches = repeat(whole, (self.length - self.consumed) // full)
        return chain.from_iterable(chain(stretches, [self._counts(tail)]) if tail else stretches)

    def closings(self) -> Iterator[bool | None]:
        """Return of each batch from the position on whether it is the last one of its update; `None`: not known here."""
        if not self.division.is_update:
            return repeat(None, self.num_batches(self.consumed))
        counts = map(self.division.count, self._stretches(self.consumed))
        return chain.from_iterable([*repeat(False, count - 1), True] for count in counts)

    def places(self) -> Iterator[int]:
        """Return where each batch from the position on begins in the order of the pass; padding has the place that it would have."""
        start, full, whole = self.consumed, self.division.samples, self._cut(self.division.samples)
        for samples in self._stretches(start):
            for offset, _ in whole if samples == full else self._cut(samples):
                yield start + offset
            start += samples

    def ordinals(self) -> Iterator[tuple[int, int] | None]:
        """Return of each batch from the position on its number in the stretch, and how many the stretch has over all ranks; `None` where
        that depends on the number of ranks."""
        division = self.division
        if not isinstance(division, WholeMicroBatches):
            yield from repeat(None)
        else:
            for samples in self._stretches(self.consumed):
                for offset, _ in self._cut(samples):
                    yield offset // division.micro_batch_size, division.number(samples)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(epoch, index) for index in indices] for epoch, _, indices in self.keys())

    def keys(self) -> Iterator[BatchKey]:
        """Return the key of each batch to read, from the position on; padding reads the first sample of its stretch."""
        # Arguments are bound here, so that moving the position does not disturb an iterator that is under way.
        return self._keys(self.epoch, self._read_places(self.consumed, self._stretches(self.consumed)))

    def _keys(self, epoch: int, places: Iterator[tuple[int, int]]) -> Iterator[BatchKey]:
        order = self.order(epoch)
        # Several batches at a time, since computing the order of one takes nearly as long.
        while ahead := list(islice(places, max(_AHEAD // self.batch_size, 1))):
            for (position, _), indices in zip(ahead, order.parts(ahead), strict=True):
                yield BatchKey(epoch, position, indices)

    def _read_places(self, start: int, stretches: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Return the first position of each batch of this rank, and the number of samples to read from it on."""
        full, whole = self.division.samples, self._cut(self.division.samples)
        for samples in stretches:
            for offset, size in whole if samples == full else self._cut(samples):
                yield (start + offset, size) if size else (start, 1)
            start += samples

    def _stretches(self, consumed: int) -> Iterator[int]:
        """Return the samples of each stretch from a position on."""
        full = repeat(self.division.samples, (self.length - consumed) // self.division.samples)
        tail = self._tail(consumed)
        return chain(full, [tail]) if tail else full

    def order(self, epoch: int) -> Order:
        """Return the indices of an epoch in the order in which the ranks together read them."""
        seed = derive_seed(self.seed, "order", epoch) if self.shuffle else None
        return epoch_order(self.length, seed)

    def _tail(self, consumed: int) -> int:
        """Return the number of samples of the ragged stretch that ends a pass from a position on."""
        return 0 if self.drop_last else (self.length - consumed) % self.division.samples

    def _cut(self, samples: int) -> list[tuple[int, int]]:
        """Return offset and size of this rank's batches of a stretch; a batch of size 0 is padding."""
        return [(offset, size) for offset, size in self.division.cut(samples, self.rank) if size or self.pad]

    def _counts(self, samples: int) -> list[tuple[int, int]]:
        totals = self.division.totals(samples)
        return [(size, total) for (_, size), total in zip(self._cut(samples), totals, strict=False)]
