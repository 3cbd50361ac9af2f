"""Which samples make which batch on which rank: how an update is divided, and the batches of a rank from any position on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from .order import Order, epoch_order
from .randomness import derive_seed

_AHEAD = 1024
"""Samples whose order is computed at a time."""


class Share(NamedTuple):
    """What a loader reads: a split, seeded by the run, and which of how many shares of it."""

    split: str = "train"
    seed: int = 0
    rank: int = 0
    world_size: int = 1


class Batch(NamedTuple):
    """One batch as a loader delivered it.

    Attributes:
        data: What the loader delivered.
        samples: Real samples on this rank, 0 for padding, `None` where only the data could tell.
        total: Real samples over all ranks, `None` where it is not known.
        closes: Whether it is the last one of its update, `None` where `accum_steps` says so.
        place: Where it is in the pass, which random numbers are keyed by: the position of its first sample in an order that all ranks
            share, else the rank and the number of the batch. Equal on ranks of one data coordinate, and after a resume.
        ordinal: With `gradient_sum: canonical`, its number in the update, over all ranks, and how many micro-batches the update has.
        read: How many samples were read for it in an order of the user's, where `samples` is `None`; the data may have fewer, or more.
    """

    data: Any
    samples: int | None
    total: int | None
    closes: bool | None = None
    place: tuple[int, ...] = ()
    ordinal: tuple[int, int] | None = None
    read: int | None = None


class BatchKey(NamedTuple):
    """What a worker is asked for: the pass, the position of the first sample in its order, and what the sampler names the samples by."""

    epoch: int
    position: int
    indices: list[Any]


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and size of one of the parts of a whole that is divided as evenly as can be, larger parts first."""
    size, larger = divmod(total, parts)
    return index * size + min(index, larger), size + (index < larger)


@dataclass(frozen=True)
class Division:
    """Which samples of a stretch of the order each rank takes, and in which micro-batches.

    A rank takes a contiguous share, which it cuts into micro-batches. Shares differ by at most one sample, and so do
    the micro-batches of a rank. All ranks make equally many micro-batches, so that what they do together, such as the
    reduction of gradients, stays in step; where a share has fewer samples than that, some micro-batches are empty.

    Attributes:
        samples: Samples of a full stretch, over all ranks.
        world_size: Number of ranks.
        micro_batch_size: The most samples that a rank holds at once.
        micro_batches: Micro-batches of a full stretch on each rank.
        is_update: Whether a stretch is a whole update; else an update is made of several, as `accum_steps` says.
    """

    samples: int
    world_size: int
    micro_batch_size: int
    micro_batches: int
    is_update: bool

    @classmethod
    def of_batches(cls, batch_size: int, world_size: int) -> Division:
        """Give each rank a batch of so many samples."""
        return cls(batch_size * world_size, world_size, batch_size, 1, is_update=False)

    @classmethod
    def of_update(
        cls,
        samples: int,
        world_size: int,
        *,
        micro_batches: int = 1,
        micro_batch_size: int | None = None,
    ) -> Division:
        """Divide a whole update.

        Args:
            micro_batches: Micro-batches of each rank; never more than it has samples.
            micro_batch_size: The most samples that a rank holds at once; decides the number of micro-batches.

        Raises:
            ValueError: If there are fewer samples than ranks.
        """
        if samples < world_size:
            raise ValueError(
                f"Expected dataloader.global_batch_size to be at least the number of ranks that read different "
                f"samples, {world_size}. Received: dataloader.global_batch_size={samples}. Raise it, or start fewer "
                "processes."
            )
        # The share of rank 0, which no other one exceeds: what holds for it holds for all ranks.
        share = -(-samples // world_size)
        if micro_batch_size is None:
            micro_batches = min(micro_batches, share)
            return cls(
                samples, world_size, -(-share // micro_batches), micro_batches, is_update=True
            )
        held = min(micro_batch_size, share)
        return cls(samples, world_size, held, -(-share // held), is_update=True)

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of a full stretch have one size, on all ranks."""
        return self.samples == self.world_size * self.micro_batches * self.largest(self.samples)

    def share(self, samples: int, rank: int) -> tuple[int, int]:
        """Return offset and size of a rank's share of a stretch of so many samples."""
        return part(samples, self.world_size, rank)

    def count(self, samples: int) -> int:
        """Return how many micro-batches every rank makes of a stretch of so many samples."""
        if samples == self.samples:
            return self.micro_batches
        # Rank 0 has the largest share. The others count as many, and may end with an empty one.
        return -(-self.share(samples, 0)[1] // self.micro_batch_size)

    def largest(self, samples: int) -> int:
        """Return the most samples that a rank holds at once of a stretch of so many samples."""
        return part(self.share(samples, 0)[1], self.count(samples), 0)[1] if samples else 0

    def cut(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return offset, from the beginning of the stretch, and size of each micro-batch of a rank; a size may be 0."""
        start, size = self.share(samples, rank)
        count = self.count(samples)
        parts = (part(size, count, index) for index in range(count))
        return [(start + offset, held) for offset, held in parts]

    def totals(self, samples: int) -> list[int]:
        """Return the samples of each micro-batch over all ranks."""
        # Shares have two sizes at most, so the work does not grow with the number of ranks.
        size, larger = divmod(samples, self.world_size)
        count = self.count(samples)
        kinds = ((size + 1, larger), (size, self.world_size - larger))
        return [
            sum(part(held, count, index)[1] * ranks for held, ranks in kinds)
            for index in range(count)
        ]

    def ordinal(self, offset: int, samples: int) -> tuple[int, int] | None:
        """Return the number of a micro-batch in a stretch over all ranks, and how many there are; `None` where ranks change that."""
        return None

    def capped(self, micro_batch_size: int) -> Division:
        """Return a division with at most so many samples at once; this one if it already has no more."""
        if micro_batch_size >= self.micro_batch_size:
            return self
        return Division.of_update(self.samples, self.world_size, micro_batch_size=micro_batch_size)


class WholeMicroBatches(Division):
    """Cuts a stretch into the same micro-batches at any number of ranks: all of one size but the last, which may be shorter.

    A rank takes a contiguous range of them, none where there are more ranks than micro-batches. All ranks count equally many, so that some
    end with an empty one.
    """

    @classmethod
    def of(
        cls, samples: int, world_size: int, micro_batch_size: int, *, is_update: bool
    ) -> WholeMicroBatches:
        """Divide a stretch of so many samples."""
        number = -(-samples // micro_batch_size)
        return cls(
            samples, world_size, min(micro_batch_size, samples), -(-number // world_size), is_update
        )

    def number(self, samples: int) -> int:
        """Return the micro-batches of a stretch of so many samples over all ranks."""
        return -(-samples // self.micro_batch_size)

    def share(self, samples: int, rank: int) -> tuple[int, int]:
        """Return offset and size of a rank's share of a stretch of so many samples."""
        first, count = part(self.number(samples), self.world_size, rank)
        start, end = (
            min(index * self.micro_batch_size, samples) for index in (first, first + count)
        )
        return start, end - start

    def count(self, samples: int) -> int:
        """Return how many micro-batches every rank makes of a stretch of so many samples."""
        return -(-self.number(samples) // self.world_size)

    def largest(self, samples: int) -> int:
        """Return the most samples that a rank holds at once of a stretch of so many samples."""
        return min(self.micro_batch_size, samples)

    def cut(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return offset, from the beginning of the stretch, and size of each micro-batch of a rank; a size may be 0."""
        start, size = self.share(samples, rank)
        held = range(
            start, start + self.count(samples) * self.micro_batch_size, self.micro_batch_size
        )
        return [
            (min(place, start + size), max(min(self.micro_batch_size, start + size - place), 0))
            for place in held
        ]

    def totals(self, samples: int) -> list[int]:
        """Return the samples of each micro-batch over all ranks."""
        full, rest = divmod(self.number(samples), self.world_size)
        ranks = [self.world_size] * full
        if rest:
            ranks.append(rest)
        totals = [self.micro_batch_size * count for count in ranks]
        # The last rank with a micro-batch has the short one, as its last.
        totals[max(full - 1, 0)] -= self.number(samples) * self.micro_batch_size - samples
        return totals

    def ordinal(self, offset: int, samples: int) -> tuple[int, int] | None:
        """Return the number of a micro-batch in a stretch over all ranks, and how many there are."""
        return offset // self.micro_batch_size, self.number(samples)


class _Cut(NamedTuple):
    """A batch of one rank in a stretch: its offset, its samples (0: padding), those of all ranks, and what `Batch` has by these names."""

    offset: int
    samples: int
    total: int
    closes: bool | None
    ordinal: tuple[int, int] | None


class PositionedBatchSampler(Sampler[BatchKey]):
    """Keys of the batches of one rank, from any position of any epoch on.

    The order of an epoch is a permutation drawn from (seed, epoch), or the dataset's own order. It is cut into
    stretches, the samples of a global batch or of a whole update, which are divided over the ranks; see `Division`.
    The position is the number of samples of the order that are consumed, over all ranks: it means the same for another
    batch size and another world size. Nothing before it is read.

    The last stretch may be ragged; it is divided as evenly as can be. A rank for which nothing is left gets no batch,
    or, with `pad`, one sample of weight zero, so that every rank makes the same number of updates.

    Args:
        length: Number of samples of the dataset.
        share: The share of this rank.
        division: How a stretch is divided. That of an update is always padded.
        shuffle: Permute the samples anew in each epoch.
        drop_last: Leave out a ragged stretch.
        pad: Give a padding sample to a rank for which nothing is left.
    """

    kind = "position"
    length_is_known = True
    ranks = ()

    def __init__(
        self,
        length: int,
        share: Share,
        division: Division,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        pad: bool = False,
    ) -> None:
        self.length, self.division = length, division
        self.split, self.seed, self.rank, self.world_size = share
        self.shuffle = shuffle
        self.drop_last = drop_last
        # A rank that makes fewer micro-batches of an update would leave the others in a collective
        # that it never comes to.
        self.pad = pad or division.is_update
        self.epoch = 0
        self.consumed = 0

    def order(self, epoch: int) -> Order:
        """Return the indices of an epoch in the order in which the ranks together read them."""
        seed = derive_seed(self.seed, "order", epoch) if self.shuffle else None
        return epoch_order(self.length, seed)

    # Batches

    def __iter__(self) -> Iterator[BatchKey]:
        """Return the key of each batch to read, from the position on; padding reads the first sample of its stretch."""
        # Arguments are bound here, so that moving the position does not disturb an iterator that is under way.
        return self._keys(self.epoch, self._walk(self.consumed))

    def _keys(self, epoch: int, walk: Iterator[tuple[int, _Cut]]) -> Iterator[BatchKey]:
        order = self.order(epoch)
        # Several batches at a time, since computing the order of one takes nearly as long.
        number = max(_AHEAD // self.division.micro_batch_size, 1)
        while ahead := list(islice(walk, number)):
            places = [
                (start + cut.offset, cut.samples) if cut.samples else (start, 1)
                for start, cut in ahead
            ]
            for (first, _), indices in zip(places, order.parts(places), strict=True):
                yield BatchKey(epoch, first, indices)

    def batches(self, data: Iterable[Any]) -> Iterator[Batch]:
        """Return the batches of this rank from the position on, with their data."""
        return (
            Batch(each, cut.samples, cut.total, cut.closes, (start + cut.offset,), cut.ordinal)
            for each, (start, cut) in zip(data, self._walk(self.consumed))
        )

    def _walk(self, start: int) -> Iterator[tuple[int, _Cut]]:
        """Yield the batches of this rank from a position on, each with the position where its stretch begins."""
        full = self.division.samples
        # Full stretches are all cut alike, so one computation serves the whole pass.
        whole = self._cut(self.division.samples)
        for _ in range((self.length - start) // full):
            for cut in whole:
                yield start, cut
            start += full
        if tail := self.tail(start):
            for cut in self._cut(tail):
                yield start, cut

    def _cut(self, samples: int) -> list[_Cut]:
        """Return the batches of this rank of a stretch of so many samples."""
        division = self.division
        parts = division.cut(samples, self.rank)
        totals = division.totals(samples)
        return [
            _Cut(
                offset,
                size,
                total,
                number == len(parts) if division.is_update else None,
                division.ordinal(offset, samples),
            )
            for number, ((offset, size), total) in enumerate(zip(parts, totals), 1)
            if size or self.pad
        ]

    # Lengths

    def tail(self, start: int) -> int:
        """Return the number of samples of the ragged stretch that ends a pass from a position on."""
        return 0 if self.drop_last else (self.length - start) % self.division.samples

    @property
    def end(self) -> int:
        """Samples of a whole pass over all ranks: without a ragged stretch, where these are left out."""
        return self.length - self.length % self.division.samples if self.drop_last else self.length

    def is_even(self) -> bool:
        """Return whether every rank gets the same number of batches in a pass from the position."""
        tail = self.tail(self.consumed)
        return self.pad or tail == 0 or self.division.share(tail, self.world_size - 1)[1] > 0

    def __len__(self) -> int:
        """Return the number of batches of a whole pass on this rank."""
        return self._count(0)

    def remaining_batches(self) -> int:
        """Return the number of batches on this rank from the position to the end of the pass."""
        return self._count(self.consumed)

    def _count(self, start: int) -> int:
        number = (self.length - start) // self.division.samples * self.division.micro_batches
        tail = self.tail(start)
        return number + len(self._cut(tail)) if tail else number

    # Position

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.epoch = epoch
        self.consumed = 0

    def advance(self, batches: int) -> None:
        """Move the position: each rank has consumed `batches` more.

        Raises:
            ValueError: If they are a part of an update only, which is divided as a whole.
        """
        division = self.division
        left = self.length - self.consumed
        stretches, rest = divmod(batches, division.micro_batches)
        # Only the last update of a pass may have fewer micro-batches.
        if rest and division.is_update:
            if (stretches, rest) != (
                left // division.samples,
                division.count(left % division.samples),
            ):
                raise ValueError(
                    f"Expected the batches of whole updates, {division.micro_batches} of each rank. Received: {batches}. Move the position "
                    "once an update is made."
                )
            self.consumed = self.length
        else:
            self.consumed = min(self.consumed + stretches * division.samples, self.length)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what tells whether it fits."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "length": self.length,
            "end": self.end,
            "shuffle": self.shuffle,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `ValueError` for the position in another order, or in a dataset of another length."""
        missing = sorted({"seed", "epoch", "consumed", "length", "shuffle"} - state.keys())
        if missing:
            raise ValueError(
                f"Expected the position of split {self.split!r}. Received: a state without {', '.join(missing)} "
                f"(keys={sorted(state)}). It was saved by another kind of loader; exclude 'dataloaders' from loading."
            )
        # Only within a pass: before its first sample and after its last, another length changes
        # nothing.
        if state["length"] != self.length and state["consumed"] and not _is_over(state):
            raise ValueError(
                f"Expected split {self.split!r} to have {state['length']} samples, as when its position was saved. "
                f"Received: {self.length} samples. Restore the dataset, or exclude 'dataloaders' from loading to restart the "
                "epoch."
            )
        if not 0 <= state["consumed"] <= state["length"]:
            raise ValueError(
                f"Expected a position of split {self.split!r} between 0 and {self.length}. Received: consumed={state['consumed']}."
            )
        # Only within a pass: before its first sample nothing has been read in the other order.
        if state["consumed"] and bool(state["shuffle"]) != self.shuffle:
            raise ValueError(
                f"Expected shuffle={state['shuffle']} for split {self.split!r}, as when its position was saved within "
                f"an epoch. Received: shuffle={self.shuffle}. Restore the setting, or exclude 'dataloaders' "
                "from loading."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `check` accepts. Another batch size, number of workers or world size does not matter."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        # Between two passes, the dataset may have got another length.
        self.consumed = self.end if _is_over(state) else state["consumed"]


def _is_over(state: Mapping[str, Any]) -> bool:
    return bool(state["consumed"]) and state["consumed"] >= state.get("end", state["length"])
