"""The order of the samples of an epoch: a permutation that is computed where it is looked at, and never written down."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch

from .host_streams import get_numpy
from .randomness import mix_seed

LISTED_UP_TO = 1 << 16
"""Up to this length an order is drawn by `torch.randperm`, half a megabyte once an epoch, which is quicker to read."""

_ROUNDS = 6
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class KeyedPermutation:
    """A permutation of `range(length)` that follows from a seed; any part of it costs the same, wherever it lies.

    Up to `LISTED_UP_TO` it is `torch.randperm` of a generator with the seed. Above, an index is computed from its position alone, in
    integer arithmetic that is the same on every machine: a Feistel network of six rounds over two digits of base `a` and `b`, where
    `a * b` is barely more than the length, as in Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), method
    "generalized Feistel"; positions that it sends beyond the length are sent on until they fall below (cycle walking). The round function
    is the multiply-and-shift mixer of SplitMix64 (Steele, Lea and Flood, 2014), reduced to a digit by its upper half.

    Args:
        length: Number of samples, at least 1 and at most 2**62.
        seed: Of 63 bits, such as `derive_seed` returns.

    Raises:
        ValueError: If the length is out of range.
    """

    def __init__(self, length: int, seed: int) -> None:
        if not 1 <= length <= 1 << 62:
            raise ValueError(f"Expected a length between 1 and 2**62. Received: length={length}.")
        self.length = length
        self._listed = _listed(length, seed) if length <= LISTED_UP_TO else None
        self._first_base = isqrt(length - 1) + 1
        self._second_base = -(-length // self._first_base)
        family = mix_seed(seed, length)
        self._keys = [mix_seed(family, number) for number in range(_ROUNDS)]

    def indices(self, first: int, count: int) -> list[int]:
        """Return the indices at the positions from `first` on, at most `count`, fewer at the end.

        Args:
            first: A position, at least 0.
            count: How many.
        """
        last = min(first + count, self.length)
        if first >= last:
            return []
        if self._listed is not None:
            listed: list[int] = self._listed[first:last].tolist()
            return listed
        numpy = get_numpy()
        if numpy is None:
            return [self.index(position) for position in range(first, last)]
        return self._walk(numpy, numpy.arange(first, last, dtype="uint64"))

    def index(self, position: int) -> int:
        """Return the index at one position.

        Args:
            position: At least 0 and below the length.
        """
        if self._listed is not None:
            return int(self._listed[position])
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
            digit = high + ((word >> 32) * base >> 32)
            high, low = low, digit - base if digit >= base else digit
            base, other = other, base
        return high * self._second_base + low

    def _walk(self, numpy: Any, positions: Any) -> list[int]:
        found = self._mixed_all(numpy, positions)
        beyond = numpy.flatnonzero(found >= numpy.uint64(self.length))
        while len(beyond):
            found[beyond] = self._mixed_all(numpy, found[beyond])
            beyond = beyond[found[beyond] >= numpy.uint64(self.length)]
        indices: list[int] = found.tolist()
        return indices

    def _mixed_all(self, numpy: Any, positions: Any) -> Any:
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
            # Of unsigned integers: what is below the base becomes huge when the base is taken away, and stays.
            high, low = low, numpy.minimum(word, word - base)
            base, other = other, base
        high *= width
        high += low
        return high


def _listed(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
