"""Turns of several parties in fixed proportions: in every prefix each has what is due to it, to less than one turn."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm
from numbers import Rational, Real
from typing import Any

LARGEST_PERIOD = 10**6
"""The largest common denominator of proportions; finer ones are rounded to multiples of one part in a million."""


def proportions_of(weights: Mapping[str, object]) -> dict[str, Fraction]:
    """Return weights as fractions that add up to one.

    A float is taken for the shortest decimal that reads the same, so that 0.7 and 0.3 are seven and three tenths.

    Args:
        weights: Numbers of at least zero by name, of any sum.

    Raises:
        ValueError: If one is not such a number, or all are zero.
    """
    exact = {name: _fraction(name, weight) for name, weight in weights.items()}
    total = sum(exact.values(), Fraction(0))
    if not total:
        raise ValueError(
            f"Expected a weight above zero. Received: weights={dict(weights)!r}. Give one source a positive weight."
        )
    shares = {name: share / total for name, share in exact.items()}
    if lcm(*(share.denominator for share in shares.values())) <= LARGEST_PERIOD:
        return shares
    return _rounded(shares)


def _fraction(name: str, weight: Any) -> Fraction:
    refused = isinstance(weight, bool) or not isinstance(weight, Real)
    if not refused:
        exact = Fraction(weight) if isinstance(weight, Rational) else None
        if exact is None and float("-inf") < float(weight) < float("inf"):
            exact = Fraction(repr(float(weight)))
        if exact is not None and exact >= 0:
            return exact
    raise ValueError(
        f"Expected the weight of source {name!r} to be a finite number of at least 0. Received: weights[{name!r}]={weight!r} "
        f"({type(weight).__name__})."
    )


def _rounded(shares: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Return multiples of one in a million by largest remainders, so that they add up to one; nobody is left without a turn."""
    parts = {name: share * LARGEST_PERIOD for name, share in shares.items()}
    whole = {name: max(int(part), 1 if part else 0) for name, part in parts.items()}
    missing = LARGEST_PERIOD - sum(whole.values())
    by_remainder = sorted(parts, key=lambda name: whole[name] - parts[name])
    for name in by_remainder[:missing] if missing > 0 else [max(whole, key=lambda name: whole[name])]:
        whole[name] += 1 if missing > 0 else missing
    return {name: Fraction(part, LARGEST_PERIOD) for name, part in whole.items()}


class Turns:
    """Whose turn it is, as a periodic table.

    In every prefix of `n` turns a party with the share `w` has had more than `n w - 1` and fewer than `n w + 1`. Each turn goes, of those
    that are not ahead of their share, to the one that would be behind first: Tijdeman, "The chairman assignment problem" (Discrete
    Mathematics 32, 1980).

    Args:
        shares: Of each party, with a common denominator of at most `LARGEST_PERIOD`; they add up to one.
    """

    def __init__(self, shares: tuple[Fraction, ...]) -> None:
        self.shares = shares
        self.period = lcm(*(share.denominator for share in shares))
        self.in_period = [int(share * self.period) for share in shares]
        """Turns of each party in a period."""
        self._party = array("I", _assign(self.in_period, self.period))
        self._number = array("I", bytes(4 * self.period))
        had = [0] * len(shares)
        for turn, party in enumerate(self._party):
            self._number[turn] = had[party]
            had[party] += 1

    def at(self, turn: int) -> tuple[int, int]:
        """Return whose turn it is, and the how manieth of that party, both from 0."""
        periods, rest = divmod(turn, self.period)
        party = self._party[rest]
        return party, periods * self.in_period[party] + self._number[rest]

    def counts(self, turns: int) -> list[int]:
        """Return how many of the first turns each party has had."""
        periods, rest = divmod(turns, self.period)
        counts = [periods * count for count in self.in_period]
        missing = set(range(len(counts))) if rest else set()
        # Not later than one turn after its share of them, so the last turn of each is near.
        for turn in range(rest - 1, -1, -1):
            if not missing:
                break
            party = self._party[turn]
            if party in missing:
                counts[party] += self._number[turn] + 1
                missing.discard(party)
        return counts

    def turns_until(self, party: int, number: int) -> int:
        """Return how many turns there are until a party has had so many."""
        if number <= 0:
            return 0
        periods, rest = divmod(number - 1, self.in_period[party])
        begin = int(rest / self.shares[party])
        for turn in range(max(begin - int(1 / self.shares[party]) - 1, 0), self.period):
            if self._party[turn] == party and self._number[turn] == rest:
                return periods * self.period + turn + 1
        raise AssertionError("a party has all its turns within a period")


@lru_cache(maxsize=16)
def turns_of(shares: tuple[Fraction, ...]) -> Turns:
    """Return the turns of shares; the table of a period of a million takes a second or two to make."""
    return Turns(shares)


def _assign(shares: list[int], period: int) -> list[int]:
    """Return whose turn each of a period is."""
    # The number-th turn of a party comes after `number * period / share` turns at the earliest, and is due one later of its own.
    waiting = [(0, party) for party, share in enumerate(shares) if share]
    waiting.sort()
    had = [0] * len(shares)
    due: list[tuple[int, int]] = []
    order: list[int] = []
    for turn in range(period):
        while waiting and waiting[0][0] <= turn:
            _, party = heappop(waiting)
            heappush(due, (-(-(had[party] + 1) * period // shares[party]), party))
        _, party = heappop(due)
        order.append(party)
        had[party] += 1
        heappush(waiting, (had[party] * period // shares[party], party))
    return order
