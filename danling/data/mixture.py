"""A dataset made of several in given proportions, in its own order."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm
from numbers import Rational, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .order import Order, OrderedDataset, epoch_order, length_of
from .randomness import derive_seed

Weights = Mapping[str, float]
SOURCE = "source"
"""Entry of a labelled sample with the number of its source."""


class _Stage(NamedTuple):
    """Epochs in a row that have the same weights.

    Attributes:
        first: The first of them.
        turns: Whose turn it is at each sample from there on.
        before: Samples of each source that were read before.
    """

    first: int
    turns: Turns
    before: tuple[int, ...]


class Mixture(OrderedDataset):
    """Samples of several map-style datasets in given proportions.

    In every stretch from the beginning of the weights on, each source has its share of the samples to less than one. A source is
    read in separate passes, each in a new order, and goes on where it was when an epoch of the mixture ends: a small one is
    repeated while a large one is read once. Which sample is at a position follows from the seed, the epoch and the position
    alone and is found by a binary search, so a run resumes exactly at any position, with any number of workers and processes.

    The order is the mixture's own: the loader neither shuffles it nor is asked to.

    Examples:
        >>> mixture = Mixture({"web": range(100), "code": range(10)}, weights={"web": 0.7, "code": 0.3}, length=20)
        >>> mixture.samples(0, 10)
        {'web': 7, 'code': 3}

    Args:
        sources: Map-style datasets by name.
        weights: Numbers of at least zero by name, of any sum; or such mappings by the epoch from which on they hold, which begin at
            epoch 0; or a function of the epoch that returns one and always returns the same. A float is taken for the shortest
            decimal that reads the same. A common denominator of more than a million is rounded; see `shares`.
        length: Samples of an epoch: `"longest"` until every source was read through once, `"shortest"` until one of them would be read
            again, both with the weights of epoch 0, or a number.
        shuffle: Read each pass of a source in a new order, else in its own. A `Mixture` or `Packed` among them keeps its order.
        labelled: Tell the number of its source with each sample: as the entry `source` of a mapping, or behind the last element of a
            tuple or list. See `by_source`.

    Raises:
        ValueError: If a source is no map-style dataset or empty, names do not agree, or weights or the length are out of range.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | Mapping[int, Weights] | Callable[[int], Weights],
        *,
        length: int | str = "longest",
        shuffle: bool = True,
        labelled: bool = False,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ValueError(
                f"Expected datasets by name. Received: sources={sources!r} ({type(sources).__name__}). Pass a mapping such as "
                '{"web": web, "code": code}.'
            )
        # An empty mapping counts as weights, so that an error names the sources without one.
        is_by_epoch = (
            isinstance(weights, Mapping)
            and weights
            and all(isinstance(key, int) for key in weights)
        )
        by_epoch: Any = weights if callable(weights) or is_by_epoch else {0: weights}
        # A stage continues where the one before ended, so that the first of them must be known.
        begins_at_zero = callable(by_epoch) or (0 in by_epoch and min(by_epoch) == 0)
        if not begins_at_zero:
            raise ValueError(
                f"Expected weights by epoch that begin at epoch 0. Received: epochs {sorted(by_epoch)}. Add the weights of epoch 0."
            )
        self.sources = dict(sources)
        self.names = list(self.sources)
        self.lengths = [
            length_of(source, f"source {name!r}") for name, source in self.sources.items()
        ]
        self.shuffle = shuffle
        self.labelled = labelled
        self._weights = by_epoch
        self._orders: dict[int, tuple[int, Order]] = {}
        self._stage = _Stage(0, self._turns_at(0), (0,) * len(self.names))
        self._offset = 0
        self._stages = [self._stage]
        self._known_until = 0
        self._length = self._chosen_length(length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        """Return the sample at a position of the epoch."""
        if not 0 <= position < self._length:
            raise IndexError(
                f"Expected a position between 0 and {self._length - 1}. Received: position={position}."
            )
        number, index = self.locate(position)
        sample = self.sources[self.names[number]][index]
        if not self.labelled:
            return sample
        if isinstance(sample, Mapping):
            return {**sample, SOURCE: number}
        # A named tuple would come back as a plain one, without its names: it is refused below.
        if isinstance(sample, (tuple, list)) and not hasattr(sample, "_fields"):
            return (*sample, number)
        raise ValueError(
            f"Expected samples of a labelled mixture to be mappings, tuples or lists, which can contain the number of their source. "
            f"Received: {type(sample).__name__} from source {self.names[number]!r}. Return a mapping, or leave labelled out."
        )

    def locate(self, position: int) -> tuple[int, int]:
        """Return the number of the source, in the order of `names`, and the index in it, at a position of the epoch."""
        number, taken = self._stage.turns.at(self._offset + position)
        passes, place = divmod(self._stage.before[number] + taken, self.lengths[number])
        source = self.sources[self.names[number]]
        # A source with its own order gets the number of the pass as its epoch, since only the
        # position tells when one begins.
        if isinstance(source, OrderedDataset):
            if source.epoch != passes:
                source.set_epoch(passes)
            return number, place
        order = self._orders.get(number)
        if order is None or order[0] != passes:
            seed = (
                derive_seed(self.seed, "mixture", self.names[number], passes)
                if self.shuffle
                else None
            )
            order = self._orders[number] = passes, epoch_order(self.lengths[number], seed)
        return number, order[1].indices(place, 1)[0]

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; sources with `set_epoch` get it, those with their own order get the number of their own pass."""
        self.epoch, self._stage = epoch, self._stage_of(epoch)
        self._offset = (epoch - self._stage.first) * self._length
        for source in self.sources.values():
            if hasattr(source, "set_epoch") and not isinstance(source, OrderedDataset):
                source.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Take the orders of the sources from another seed, also in mixtures among them. The library's loader calls it with its own."""
        if seed != self.seed:
            self.seed = seed
            self._orders.clear()
        for name, source in self.sources.items():
            if isinstance(source, OrderedDataset):
                source.set_seed(derive_seed(seed, "mixture", name))

    def parts(self) -> dict[str, object]:
        """Return the sources."""
        return {f".sources[{name!r}]": source for name, source in self.sources.items()}

    # Metrics

    @property
    def shares(self) -> dict[str, Fraction]:
        """The exact share of each source in this epoch."""
        return dict(zip(self.names, self._stage.turns.shares, strict=True))

    def samples(self, epoch: int, consumed: int) -> dict[str, int]:
        """Return how many samples of each source a run has read.

        Args:
            epoch: The epoch of its position.
            consumed: Samples of that epoch, over all ranks.
        """
        stage = self._stage_of(epoch)
        counts = stage.turns.counts((epoch - stage.first) * self._length + consumed)
        return {
            name: before + count
            for name, before, count in zip(self.names, stage.before, counts, strict=True)
        }

    def by_source(self, values: Tensor, sources: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the sum of values and their number for each source, such as for `runner.meters.add_totals`.

        Args:
            values: One a sample, of shape (N,), such as losses with `reduction="none"`.
            sources: The numbers of their sources, of shape (N,), as a labelled mixture gives them.

        Returns:
            0-dim tensors in float64 by name, on the device of the values, for which nothing waits.
        """
        size = len(self.names)
        numbers = sources.to(values.device)
        sums = torch.zeros(size, dtype=torch.float64, device=values.device)
        counts = torch.zeros_like(sums)
        wide = values.detach().to(torch.float64)
        sums.index_add_(0, numbers, wide)
        counts.index_add_(0, numbers, torch.ones_like(wide))
        return {name: (sums[number], counts[number]) for number, name in enumerate(self.names)}

    # What a position is good for

    def fingerprint(self, epoch: int) -> dict[str, str]:
        """Return what positions up to an epoch depend on, as text: the sources and their lengths, and the weights until then."""
        self._stage_of(epoch)
        stages = [stage for stage in self._stages if stage.first <= epoch]
        shares = [
            f"{stage.first}: " + ", ".join(str(share) for share in stage.turns.shares)
            for stage in stages
        ]
        return {
            "sources": ", ".join(
                f"{name}: {length}" for name, length in zip(self.names, self.lengths, strict=True)
            ),
            "shares by epoch": "; ".join(shares),
            "shuffle": str(self.shuffle),
        }

    def _other_fix(self, epoch: int) -> str:
        return f" New weights may begin at a later epoch: weights by epoch, with a key {epoch + 1}."

    # Weights by epoch

    def _stage_of(self, epoch: int) -> _Stage:
        # Each epoch in turn: how far a source was read at the beginning of a stage follows from all stages before.
        for later in range(self._known_until + 1, epoch + 1):
            last = self._stages[-1]
            turns = self._turns_at(later)
            self._known_until = later
            if turns.shares != last.turns.shares:
                counts = last.turns.counts((later - last.first) * self._length)
                before = tuple(
                    begun + count for begun, count in zip(last.before, counts, strict=True)
                )
                self._stages.append(_Stage(later, turns, before))
        return next(stage for stage in reversed(self._stages) if stage.first <= epoch)

    def _turns_at(self, epoch: int) -> Turns:
        """Return the turns of the weights that begin at an epoch."""
        given = self._weights
        weights = (
            given(epoch)
            if callable(given)
            else given[max(first for first in given if first <= epoch)]
        )
        if not isinstance(weights, Mapping) or set(weights) != set(self.names):
            names = sorted(map(str, weights)) if isinstance(weights, Mapping) else repr(weights)
            raise ValueError(
                f"Expected a weight for each of the sources {sorted(self.names)} at epoch {epoch}. Received: {names}. Give every source "
                "one, 0 for none."
            )
        return turns_of(
            tuple(proportions_of({name: weights[name] for name in self.names}).values())
        )

    def _chosen_length(self, length: object) -> int:
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return length
        turns = self._stages[0].turns
        # A source of weight 0 has no turn, however long one waits: it must not decide the length.
        read = [number for number, share in enumerate(turns.shares) if share]
        if length == "longest":
            return max(turns.turns_until(number, self.lengths[number]) for number in read)
        if length == "shortest":
            # One sample more than it has is read again: the epoch ends before that.
            return min(turns.turns_until(number, self.lengths[number] + 1) for number in read) - 1
        raise ValueError(
            f"Expected length to be 'longest', 'shortest' or a positive number of samples. Received: length={length!r} "
            f"({type(length).__name__})."
        )

    def __getstate__(self) -> dict[str, object]:
        # Orders are made again where they are needed.
        return {**self.__dict__, "_orders": {}}


# Turns in fixed proportions

LARGEST_PERIOD = 10**6
"""The largest common denominator of proportions; finer ones are rounded to multiples of one part in a million."""


def proportions_of(weights: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return weights as fractions that add up to one.

    A float is taken for the shortest decimal that reads the same, so that 0.7 and 0.3 are seven and three tenths.
    """
    exact: dict[str, Fraction] = {}
    for name, weight in weights.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, Real)
            or not 0 <= float(weight) < float("inf")
        ):
            raise ValueError(
                f"Expected the weight of source {name!r} to be a finite number of at least 0. Received: weights[{name!r}]={weight!r} "
                f"({type(weight).__name__})."
            )
        exact[name] = (
            Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))
        )
    total = sum(exact.values(), Fraction(0))
    if not total:
        raise ValueError(
            f"Expected a weight above zero. Received: weights={dict(weights)!r}. Give one source a positive weight."
        )
    shares = {name: share / total for name, share in exact.items()}
    if lcm(*(share.denominator for share in shares.values())) <= LARGEST_PERIOD:
        return shares
    # Multiples of one in a million by largest remainders, so that they add up to one.
    parts = {name: share * LARGEST_PERIOD for name, share in shares.items()}
    # At least one of each source that has a share, which may make more than a million in all: the largest source gives those up.
    whole = {name: max(int(part), int(part > 0)) for name, part in parts.items()}
    missing = LARGEST_PERIOD - sum(whole.values())
    if missing < 0:
        largest = max(whole, key=lambda name: whole[name])
        whole[largest] += missing
    # The most negative first: those that rounding down has cost the most.
    by_remainder = sorted(parts, key=lambda name: whole[name] - parts[name])
    for name in by_remainder[: max(missing, 0)]:
        whole[name] += 1
    return {name: Fraction(part, LARGEST_PERIOD) for name, part in whole.items()}


class Turns:
    """Whose turn it is, as a periodic table.

    In every prefix of `n` turns a party with the share `w` has had more than `n w - 1` and fewer than `n w + 1`. Each turn goes, of those
    that are not ahead of their share, to the one that would be behind first: Tijdeman, "The chairman assignment problem" (Discrete
    Mathematics 32, 1980).
    """

    def __init__(self, shares: tuple[Fraction, ...]) -> None:
        self.shares = shares
        self.period = lcm(*(share.denominator for share in shares))
        self.in_period = [int(share * self.period) for share in shares]
        """Turns of each party in a period."""
        self._party = array("I")
        """Whose turn each of a period is."""
        self._turns = [array("I") for _ in shares]
        """Turns of each party within a period, rising."""
        # The number-th turn of a party comes after `number * period / share` turns at the earliest, and is due one period later.
        waiting = [(0, party) for party, share in enumerate(self.in_period) if share]
        due: list[tuple[int, int]] = []
        for turn in range(self.period):
            while waiting and waiting[0][0] <= turn:
                _, party = heappop(waiting)
                heappush(
                    due,
                    (
                        -(-(len(self._turns[party]) + 1) * self.period // self.in_period[party]),
                        party,
                    ),
                )
            _, party = heappop(due)
            self._party.append(party)
            self._turns[party].append(turn)
            heappush(
                waiting, (len(self._turns[party]) * self.period // self.in_period[party], party)
            )

    def at(self, turn: int) -> tuple[int, int]:
        """Return whose turn it is, and the how manieth of that party, both from 0."""
        periods, rest = divmod(turn, self.period)
        party = self._party[rest]
        return party, periods * self.in_period[party] + bisect_left(self._turns[party], rest)

    def counts(self, turns: int) -> list[int]:
        """Return how many of the first turns each party has had."""
        periods, rest = divmod(turns, self.period)
        return [periods * len(own) + bisect_left(own, rest) for own in self._turns]

    def turns_until(self, party: int, number: int) -> int:
        """Return how many turns there are until a party has had so many, at least one."""
        periods, rest = divmod(number - 1, self.in_period[party])
        return periods * self.period + self._turns[party][rest] + 1


@lru_cache(maxsize=16)
def turns_of(shares: tuple[Fraction, ...]) -> Turns:
    """Return the turns of shares; the table of a period of a million takes a second or two to make."""
    return Turns(shares)
