"""The order of the samples of a pass: that of the dataset, a drawn permutation, or one that is computed position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isqrt
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from .randomness import get_numpy, mix_seed

LISTED_UP_TO = 1 << 16
"""Up to this length `torch.randperm` draws the order: it takes half a megabyte per epoch, and is quicker to read."""

_ROUNDS = 6
_MASK = (1 << 64) - 1
# The multipliers of SplitMix64. Any change of them, or of the rounds, breaks positions that runs
# have saved.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Order:
    """The indices of a pass, by position: here the order of the dataset itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def indices(self, first: int, count: int) -> list[int]:
        """Return the indices at the positions from `first` on, at most `count`, fewer at the end."""
        return list(range(first, min(first + count, self.length)))

    def parts(self, places: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the indices of several stretches of positions, each given as (first, count)."""
        return [self.indices(first, count) for first, count in places]


def epoch_order(length: int, seed: int | None) -> Order:
    """Return the order of a pass.

    Up to `LISTED_UP_TO` samples `torch.randperm` draws the permutation; above, each index is computed when it is read.
    """
    if seed is None:
        return Order(length)
    if length <= LISTED_UP_TO:
        return ListedPermutation(length, seed)
    return KeyedPermutation(length, seed)


class ListedPermutation(Order):
    """`torch.randperm` of a generator with the seed: eight bytes a sample on every rank, and a while before the first batch."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__(length)
        self._indices = torch.randperm(length, generator=torch.Generator().manual_seed(seed))

    def indices(self, first: int, count: int) -> list[int]:
        """Return a part of the list."""
        return self.parts([(first, count)])[0]

    def parts(self, places: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return several parts of the list."""
        indices = self._indices
        return [indices[first : first + count].tolist() for first, count in places]


class KeyedPermutation(Order):
    """A permutation of `range(length)` that follows from a seed; any part of it costs the same, wherever it is.

    An index is computed from its position alone, in integer arithmetic that is the same on every machine: a Feistel network of six rounds
    over two digits of base `a` and `b`, where `a * b` is barely more than the length, as in Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains" (CT-RSA 2002), method "generalized Feistel"; positions that it sends beyond the length are sent on until they fall
    below (cycle walking). The round function is the multiply-and-shift mixer of SplitMix64 (Steele, Lea and Flood, 2014), reduced to a
    digit by its upper half. Made for lengths above `LISTED_UP_TO`; of a handful of samples it reaches some permutations only.
    """

    def __init__(self, length: int, seed: int) -> None:
        if not 1 <= length <= 1 << 62:
            raise ValueError(f"Expected a length between 1 and 2**62. Received: length={length}.")
        super().__init__(length)
        self._first_base = isqrt(length - 1) + 1
        self._second_base = -(-length // self._first_base)
        family = mix_seed(seed, length)
        self._keys = [mix_seed(family, number) for number in range(_ROUNDS)]

    def indices(self, first: int, count: int) -> list[int]:
        """Return what `index` returns of each position."""
        return self.parts([(first, count)])[0]

    def parts(self, places: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the indices of several stretches of positions, computed together: most of the time is that of a call."""
        numpy = get_numpy()
        stretches = [
            range(first, max(first, min(first + count, self.length))) for first, count in places
        ]
        # The same integers as below, only slower: a run may resume on a machine without NumPy.
        if numpy is None:
            return [[self.index(position) for position in stretch] for stretch in stretches]
        positions = [
            numpy.arange(stretch.start, stretch.stop, dtype="uint64") for stretch in stretches
        ]
        found = self._mixed_all(numpy, numpy.concatenate(positions))
        beyond = numpy.flatnonzero(found >= numpy.uint64(self.length))
        while len(beyond):
            found[beyond] = self._mixed_all(numpy, found[beyond])
            beyond = beyond[found[beyond] >= numpy.uint64(self.length)]
        indices: list[int] = found.tolist()
        ends = list(accumulate(map(len, stretches)))
        return [indices[start:end] for start, end in zip([0, *ends[:-1]], ends)]

    def index(self, position: int) -> int:
        """Return the index at one position."""
        while True:
            position = self._mixed(position)
            if position < self.length:
                return position

    def _mixed(self, position: int) -> int:
        """Return where the network sends a position: of the whole domain, which is a little larger than the length."""
        high, low = divmod(position, self._second_base)
        base, other = self._first_base, self._second_base
        for key in self._keys:
            word = ((low ^ key) * _FIRST) & _MASK
            word = ((word ^ (word >> 32)) * _SECOND) & _MASK
            # The upper half of the product is a number below `base`, without a division.
            digit = high + ((word >> 32) * base >> 32)
            # The digits change places, so that the next round changes the other one.
            high, low = low, digit - base if digit >= base else digit
            base, other = other, base
        return high * self._second_base + low

    def _mixed_all(self, numpy: Any, positions: object) -> Any:
        """Return `_mixed` of an array of uint64, in fewer than ten operations a round."""
        shift, first, second = numpy.uint64(32), numpy.uint64(_FIRST), numpy.uint64(_SECOND)
        base, other = numpy.uint64(self._first_base), numpy.uint64(self._second_base)
        width = other
        high, low = numpy.divmod(positions, other)
        for key in self._keys:
            word = low ^ numpy.uint64(key)
            word *= first
            word ^= word >> shift
            word *= second
            word >>= shift
            word *= base
            word >>= shift
            word += high
            # Unsigned integers: subtracting the base makes a smaller value huge, so the minimum keeps that value.
            high, low = low, numpy.minimum(word, word - base)
            base, other = other, base
        high *= width
        high += low
        return high


def length_of(dataset: Any, name: str) -> int:
    """Return the number of samples of a map-style dataset, which a message calls by `name`.

    Raises:
        ValueError: If it is no map-style dataset, or empty.
    """
    cause: TypeError | None = None
    try:
        length = len(dataset)
    except TypeError as error:  # also one of the dataset's own
        length, cause = -1, error
    if length < 0 or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"Expected {name} to be a map-style dataset, with __len__ and __getitem__. Received: {type(dataset).__name__}. Define them. "
            "A stream is an IterableDataset in `self.datasets`; a loader of your own goes into `self.dataloaders`."
        ) from cause
    if not length:
        raise ValueError(
            f"Expected {name} to have samples. Received: an empty dataset ({type(dataset).__name__} of length 0). Check the path or the "
            "filter it is made with, or leave it out."
        )
    return length


class OrderedDataset(Dataset[Any]):
    """A map-style dataset with its own order, which a loader reads from its first position to its last and does not shuffle.

    Attributes:
        seed: What the order is drawn from; the loader sets it by `set_seed`.
        epoch: The pass; the loader sets it by `set_epoch`.
    """

    seed = 0
    epoch = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def set_seed(self, seed: int) -> None:
        """Take the order from another seed."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        raise NotImplementedError

    def parts(self) -> dict[str, object]:
        """Return the datasets that it reads, by how they are reached from it."""
        raise NotImplementedError

    def fingerprint(self, epoch: int) -> dict[str, str]:
        """Return what positions up to an epoch depend on, as text."""
        raise NotImplementedError

    def check_fingerprint(self, saved: Mapping[str, str], epoch: int, split: str) -> None:
        """Raise a `ValueError` if positions mean something else here.

        Args:
            saved: What `fingerprint` returned.
            epoch: The epoch of the position.
            split: Name of the split, for the message.
        """
        now = self.fingerprint(epoch)
        differing = [key for key, value in now.items() if value != saved.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"Expected the {type(self).__name__} of split {split!r} to have the {key} ({saved.get(key)}), as when its position in "
                f"epoch {epoch} was saved. Received: {key} ({now[key]}). Restore it, or exclude 'dataloaders' from loading to restart "
                f"the epoch.{self._other_fix(epoch)}"
            )

    def _other_fix(self, epoch: int) -> str:
        return ""
