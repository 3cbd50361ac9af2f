"""Every interleaving of the automata of `danling.elastic.protocol`, breadth first: deaths, newcomers, lost, late and doubled messages.

What was said once may come at any time, again, or never. A message that can have no effect any more is forgotten, and so is what a side
remembers and never looks at again: that leaves the interleavings as they are, and far fewer states.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from danling.elastic.protocol import (
    NEW,
    CoordinatorSide,
    Message,
    RankSide,
    StateLost,
)

_GONE = -1
"""In the place of a rank that has died."""
_ENDED = -1
"""In the place of a coordinator that has ended the run by name."""


def copied(side: Any) -> Any:
    """Return a copy of one side that shares nothing with it that changes."""
    changing = {
        name: type(value)(value)
        for name, value in vars(side).items()
        if isinstance(value, (set, dict))
    }
    return replace(side, **changing)


def frozen(side: Any) -> tuple[object, ...]:
    """Return what tells one state of a side from another."""
    return tuple(_frozen(value) for value in vars(side).values())


def _frozen(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _frozen(each)) for key, each in value.items()))
    if isinstance(value, (set, list)) and isinstance(value, Collection):
        return tuple(sorted(value)) if isinstance(value, set) else tuple(map(_frozen, value))
    return value


class World(NamedTuple):
    """One state of everything: numbers of sides, and bits of messages that may still come."""

    ranks: tuple[int, ...]
    coordinator: int
    said: int
    asked: int
    deaths: int
    births: int
    commits: int
    unnoticed: int
    """Bits of the ranks of whose death the coordinator has not heard yet."""


@dataclass(frozen=True)
class Rank:
    """A rank of the model: its side of the protocol, and how many updates it has made."""

    side: Any
    progress: int


@dataclass(frozen=True)
class Count:
    """What was found.

    Attributes:
        states: How many there are.
        running: How many of them have all living ranks in one generation.
        stuck: From how many no way leads to one of these.
        unsafe: How many were reached by what must not happen.
    """

    states: int
    running: int
    stuck: int
    unsafe: int


class _Numbers:
    """Gives equal things one number."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[object, int] = {}

    def of(self, key: object, thing: Any) -> int:
        number = self._numbers.setdefault(key, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


class Explorer:
    """Explores what may happen to some ranks.

    Args:
        ranks: Ranks at the beginning.
        deaths: How many may die.
        births: How many may come.
        commits: How many updates may be made.
        generations: Attempts to form may fail only before this generation.
        rank_side, coordinator_side: The automata.
        forgets: Whether messages without an effect are forgotten, which is right for the rules as they are.
    """

    def __init__(
        self,
        ranks: int,
        *,
        deaths: int = 0,
        births: int = 0,
        commits: int = 0,
        generations: int = 3,
        rank_side: type[RankSide] = RankSide,
        coordinator_side: type[CoordinatorSide] = CoordinatorSide,
        forgets: bool = True,
    ) -> None:
        self.generations = generations
        self._forgets = forgets
        self._make_rank = rank_side
        self._first = ranks
        self._ranks, self._coordinators = _Numbers(), _Numbers()
        self._said, self._asked = _Numbers(), _Numbers()
        self._orders = _Numbers()
        """Messages "form", each with how many updates the one that is furthest has made."""
        self._known: dict[tuple[object, ...], Any] = {}
        self._bits_of = [0] * (ranks + births)
        """Messages to each rank."""
        self.unsafe = 0
        coordinator = coordinator_side(expected=ranks, least=1)
        for index in range(ranks):
            coordinator.join(index)
        members = tuple(self._rank(rank_side(handle=f"{index}.0"), 0) for index in range(ranks))
        self.start = World(
            members, self._coordinator(coordinator), 0, 0, deaths, births, commits, 0
        )

    # Numbers of what is alike

    def _rank(self, side: Any, progress: int) -> int:
        if self._forgets:
            side.lost = side.lost if side.lost >= side.seen else -1
            side.regroups = side.regroups if side.regroups >= side.seen else -1
        return self._ranks.of((frozen(side), progress), Rank(side, progress))

    def _coordinator(self, side: Any) -> int:
        side.patience = 1.0  # how long an attempt may take does not matter here
        if self._forgets:
            side.formed = {
                member: at for member, at in side.formed.items() if at == side.generation
            }
            old = [member for member in side.roster if member in side.ready]
            for member in [each for each in old if side.ready[each].generation < side.generation]:
                del side.ready[member]
        return self._coordinators.of(frozen(side), side)

    def _once(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        key = (compute.__name__, *arguments)
        if key not in self._known:
            self._known[key] = compute(*arguments)
        return self._known[key]

    def _of(self, rank: int) -> Any:
        return self._ranks.things[rank]

    # The search

    def run(self, most: int = 20_000_000) -> Count:
        """Return how many states there are, and from how many no way leads to one where all living ranks run together."""
        seen, queue = {self.start: 0}, deque([self.start])
        froms, tos = array("i"), array("i")
        while queue:
            world = queue.popleft()
            number = seen[world]
            for moved in self._moves(world):
                following = self._without_old(moved) if self._forgets else moved
                reached = seen.get(following)
                if reached is None:
                    reached = seen[following] = len(seen)
                    queue.append(following)
                froms.append(number)
                tos.append(reached)
            assert len(seen) <= most, "too many states"
        good = np.fromiter((self._runs(world) for world in seen), bool, len(seen))
        is_last = np.fromiter((self._is_last(world) for world in seen), bool, len(seen))
        reaches = good.copy()
        backwards, forwards = np.asarray(froms), np.asarray(tos)
        before = -1
        while before != (before := int(reaches.sum())):
            reaches[backwards[reaches[forwards]]] = True
        return Count(len(seen), int(good.sum()), int((~reaches & ~is_last).sum()), self.unsafe)

    def _runs(self, world: World) -> bool:
        if world.coordinator == _ENDED:
            return True
        coordinator = self._coordinators.things[world.coordinator]
        ranks = [self._of(rank).side for rank in world.ranks if rank != _GONE]
        are_together = all(
            each.mode == "running" and each.seen == coordinator.generation for each in ranks
        )
        return coordinator.phase == "run" and are_together and not world.unnoticed

    def _is_last(self, world: World) -> bool:
        """Whether no further attempt is modelled."""
        is_ended = world.coordinator == _ENDED
        return (
            is_ended or self._coordinators.things[world.coordinator].generation >= self.generations
        )

    # What can have no effect any more

    def _without_old(self, world: World) -> World:
        if world.coordinator == _ENDED:
            return world._replace(said=0, asked=0, births=0, deaths=0, unnoticed=0)
        asked = 0
        for index, rank in enumerate(world.ranks):
            mine = world.asked & self._bits_of[index]
            if mine and rank != _GONE:
                asked |= self._once(self._asked_in_time, rank, mine)
        said = self._once(self._said_in_time, world.coordinator, world.said)
        return world._replace(said=said, asked=asked)

    def _asked_in_time(self, rank: int, mask: int) -> int:
        side: RankSide = self._of(rank).side
        kept = 0
        for number in _numbers_in(mask):
            _, kind, generation, order = self._asked.things[number]
            if kind == "lost":
                is_old = side.lost >= generation or generation < side.seen
            elif kind == "regroup":
                is_old = side.regroups >= generation or generation < side.seen
            else:
                # Again a form is heard of one that was formed, as the answer may have been lost.
                is_missed = generation == side.seen and side.mode == "ready"
                is_new = generation > side.seen
                is_of_others = is_new and side.handle not in self._orders.things[order]["handles"]
                is_old = generation < side.seen or is_missed or is_of_others
            if not is_old:
                kept |= 1 << number
        return kept

    def _said_in_time(self, number: int, mask: int) -> int:
        coordinator: CoordinatorSide = self._coordinators.things[number]
        kept = 0
        for said in _numbers_in(mask):
            member, kind, generation, *_ = self._said.things[said]
            is_old = generation < coordinator.generation and (
                kind == "formed" or member in coordinator.roster
            )
            if not is_old and member in coordinator.living:
                kept |= 1 << said
        return kept

    # What may happen next

    def _moves(self, world: World) -> Iterator[World]:
        if world.coordinator == _ENDED:
            return
        for index, rank in enumerate(world.ranks):
            if rank != _GONE:
                yield from self._moves_of_rank(world, index)
        yield from self._moves_of_coordinator(world)
        coordinator = self._coordinators.things[world.coordinator]
        # Before the first generation, none is replaced.
        if world.births and coordinator.generation:
            index = len(world.ranks)
            newcomer = self._rank(self._make_rank(handle=f"{index}.0"), NEW)
            joined = self._once(self._joined, world.coordinator, index)
            yield world._replace(
                ranks=(*world.ranks, newcomer), coordinator=joined, births=world.births - 1
            )
        for index in _numbers_in(world.unnoticed):
            removed = self._once(self._removed, world.coordinator, index)
            yield world._replace(coordinator=removed, unnoticed=world.unnoticed & ~(1 << index))

    def _joined(self, number: int, index: int) -> int:
        coordinator = copied(self._coordinators.things[number])
        coordinator.join(index)
        return self._coordinator(coordinator)

    def _removed(self, number: int, index: int) -> int:
        coordinator = copied(self._coordinators.things[number])
        coordinator.remove([index])
        return self._coordinator(coordinator)

    def _moves_of_rank(self, world: World, index: int) -> Iterator[World]:
        rank = world.ranks[index]
        side: RankSide = self._of(rank).side
        if side.mode == "ready":
            said = world.said | self._once(self._ready_bit, rank, index)
            if said != world.said:
                yield world._replace(said=said)
        if side.mode == "running":
            if side.is_lost or side.should_regroup or self._fails(world, side):
                yield self._with_rank(world, index, self._once(self._left, rank, index))
            elif world.commits and self._may_commit(world, rank):
                made = self._rank(copied(side), self._of(rank).progress + 1)
                yield self._with_rank(world, index, made)._replace(commits=world.commits - 1)
        if side.mode == "forming":
            is_lost = side.lost >= side.seen
            if is_lost or side.seen < self.generations:
                yield self._with_rank(
                    world, index, self._once(self._left, rank, index)
                )  # an attempt may always fail
            if not is_lost and self._forms_together(world, side):
                yield self._settled(world, index)
        for number in _numbers_in(world.asked & self._bits_of[index]):
            heard, said = self._once(self._heard, rank, index, number)
            if heard != rank or said & ~world.said:
                yield self._with_rank(world, index, heard)._replace(said=world.said | said)
        # A death before the first generation ends the run.
        if world.deaths and self._coordinators.things[world.coordinator].generation:
            dead = self._with_rank(world, index, _GONE)
            yield dead._replace(deaths=world.deaths - 1, unnoticed=world.unnoticed | 1 << index)

    @staticmethod
    def _with_rank(world: World, index: int, rank: int) -> World:
        return world._replace(ranks=(*world.ranks[:index], rank, *world.ranks[index + 1 :]))

    def _ready_bit(self, rank: int, index: int) -> int:
        side, progress = self._of(rank).side, self._of(rank).progress
        said = (index, "ready", side.seen, side.handle, progress)
        return 1 << self._said.of(said, said)

    def _formed_bit(self, index: int, generation: int) -> int:
        said = (index, "formed", generation, "", 0)
        return 1 << self._said.of(said, said)

    def _left(self, rank: int, index: int) -> int:
        side = copied(self._of(rank).side)
        side.leave()
        side.handle = f"{index}.{side.seen}"
        return self._rank(side, self._of(rank).progress)

    def _settled(self, world: World, index: int) -> World:
        rank = self._of(world.ranks[index])
        side, progress = copied(rank.side), rank.progress
        order = side.order
        if order["members"].index(index) in order["behind"]:
            progress = self._of(world.ranks[order["members"][order["leader"]]]).progress
        side.settle()
        # All members of a generation begin with the state that is furthest.
        self.unsafe += progress < order["furthest"]
        settled = self._with_rank(world, index, self._rank(side, progress))
        return settled._replace(said=world.said | self._formed_bit(index, side.settled))

    def _heard(self, rank: int, index: int, number: int) -> tuple[int, int]:
        side = copied(self._of(rank).side)
        _, kind, generation, order = self._asked.things[number]
        message = (
            self._orders.things[order]
            if kind == "form"
            else {"kind": kind, "generation": generation}
        )
        answer = side.hear(message)
        said = 0 if answer is None else self._formed_bit(index, answer["generation"])
        return self._rank(side, self._of(rank).progress), said

    def _fails(self, world: World, side: RankSide) -> bool:
        """Whether a collective of a running rank fails: another member has died, or has closed its sockets."""
        assert side.order is not None
        others = [world.ranks[member] for member in side.order["members"]]
        if _GONE in others:
            return True
        sides = [self._of(other).side for other in others]
        return any(other.mode == "ready" or other.seen != side.seen for other in sides)

    def _may_commit(self, world: World, rank: int) -> bool:
        """Whether a rank may have the whole sum of its next update: each member has come as far, and has added to it."""
        side, progress = self._of(rank).side, self._of(rank).progress
        living = [
            self._of(each)
            for each in (world.ranks[m] for m in side.order["members"])
            if each != _GONE
        ]
        return all(each.side.mode != "forming" and each.progress >= progress for each in living)

    def _forms_together(self, world: World, side: RankSide) -> bool:
        order = side.order
        assert order is not None
        for member, handle in zip(order["members"], order["handles"]):
            if world.ranks[member] == _GONE:
                return False
            other = self._of(world.ranks[member]).side
            if other.mode == "ready" or other.seen != order["generation"] or other.handle != handle:
                return False
        return True

    def _moves_of_coordinator(self, world: World) -> Iterator[World]:
        number = world.coordinator
        for said in _numbers_in(world.said):
            heard = self._once(self._hears, number, said)
            without = world._replace(said=world.said & ~(1 << said))
            if self._said.things[said][1] == "formed":  # said once, so it may get lost
                yield without
                yield without._replace(coordinator=heard)
            elif heard != number:
                yield world._replace(coordinator=heard)
        advanced = self._once(self._advanced, number)
        if advanced is not None:
            before = self._coordinators.things[number]
            if before.phase == "form":
                # It counts all as formed.
                sides = [
                    self._of(world.ranks[m]).side for m in before.members if world.ranks[m] != _GONE
                ]
                self.unsafe += any(each.settled != before.generation for each in sides)
            yield world._replace(coordinator=advanced)
        asked = world.asked | self._once(self._messages, number)
        for bit in _numbers_in(asked & ~world.asked):
            yield world._replace(asked=world.asked | 1 << bit)

    def _hears(self, number: int, said: int) -> int:
        coordinator = copied(self._coordinators.things[number])
        member, kind, generation, handle, progress = self._said.things[said]
        message: Message = {
            "kind": kind,
            "generation": generation,
            "handle": handle,
            "progress": progress,
            "digest": "",
        }
        coordinator.hear(member, message)
        return self._coordinator(coordinator)

    def _advanced(self, number: int) -> int | None:
        coordinator = copied(self._coordinators.things[number])
        if coordinator.phase == "collect" and coordinator.generation >= self.generations:
            return None
        try:
            has_changed = coordinator.advance()
        except StateLost:
            return _ENDED
        if not has_changed:
            return None
        if coordinator.phase == "form":
            furthest = max(coordinator.ready[member].progress for member in coordinator.roster)
            coordinator.order = {**coordinator.order, "furthest": furthest}
        return self._coordinator(coordinator)

    def _messages(self, number: int) -> int:
        bits = 0
        members, message = self._coordinators.things[number].repeated()
        for member in members:
            order = (
                self._orders.of(frozen_message(message), message)
                if message["kind"] == "form"
                else 0
            )
            asked = (member, message["kind"], message["generation"], order)
            bit = 1 << self._asked.of(asked, asked)
            bits |= bit
            self._bits_of[member] |= bit
        return bits


def frozen_message(message: Message) -> tuple[object, ...]:
    """Return what tells one message from another."""
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in message.items()
    )


def _numbers_in(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
