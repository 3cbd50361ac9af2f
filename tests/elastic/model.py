"""Every interleaving of the automata of `danling.elastic.protocol`, breadth first: deaths, newcomers, lost, late and doubled messages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from danling.elastic.protocol import NEW, CoordinatorSide, RankSide, copied, frozen

Said = tuple[int, str, int, str]
"""A message of a rank: the rank, the kind, the generation and the handle. What was said once may come at any time, and again."""
Asked = tuple[int, str, int, tuple[str, ...]]
"""A message of the coordinator: to which rank, the kind, the generation, the handles."""


class World(NamedTuple):
    """One state of everything."""

    ranks: tuple[tuple[object, ...] | None, ...]
    coordinator: tuple[object, ...]
    said: frozenset[Said]
    asked: frozenset[Asked]
    deaths: int
    births: int


@dataclass(frozen=True)
class Count:
    states: int
    running: int
    stuck: int


class Explorer:
    """Explores what may happen to some ranks.

    Args:
        ranks: Ranks at the beginning.
        deaths: How many may die.
        births: How many may come.
        generations: Attempts to form may fail only before this generation.
        rank_side, coordinator_side: The automata.
    """

    def __init__(
        self,
        ranks: int,
        *,
        deaths: int = 0,
        births: int = 0,
        generations: int = 3,
        rank_side: type[RankSide] = RankSide,
        coordinator_side: type[CoordinatorSide] = CoordinatorSide,
    ) -> None:
        self.generations = generations
        self._sides: dict[tuple[object, ...], Any] = {}
        self._forms: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
        members = [rank_side(handle=f"{index}.0") for index in range(ranks)]
        coordinator = coordinator_side(expected=ranks, least=1)
        for index in range(ranks):
            coordinator.join(index)
        self._make_rank = rank_side
        self.start = World(
            tuple(self._keep(each) for each in members),
            self._keep(coordinator),
            frozenset(),
            frozenset(),
            deaths,
            births,
        )

    def _keep(self, side: Any) -> tuple[object, ...]:
        if isinstance(side, CoordinatorSide):
            # How long an attempt may take does not matter here.
            side.patience = 1.0
        key = frozen(side)
        self._sides.setdefault(key, side)
        return key

    def _of(self, key: tuple[object, ...] | None) -> Any:
        assert key is not None
        return copied(self._sides[key])

    def run(self, most: int = 3_000_000) -> Count:
        """Return how many states there are, and from how many no way leads to one where all living ranks run together."""
        seen, queue = {self.start: 0}, deque([self.start])
        before: dict[int, list[int]] = defaultdict(list)
        worlds, good = [self.start], []
        while queue:
            world = queue.popleft()
            number = seen[world]
            if self._runs(world):
                good.append(number)
            for following in self._moves(world):
                if following not in seen:
                    seen[following] = len(worlds)
                    worlds.append(following)
                    queue.append(following)
                before[seen[following]].append(number)
            assert len(seen) <= most, "too many states"
        reached, queue_back = set(good), deque(good)
        while queue_back:
            for earlier in before[queue_back.popleft()]:
                if earlier not in reached:
                    reached.add(earlier)
                    queue_back.append(earlier)
        stuck = [
            number
            for number in range(len(worlds))
            if number not in reached and self._of(worlds[number].coordinator).generation < self.generations
        ]
        return Count(len(worlds), len(good), len(stuck))

    def _runs(self, world: World) -> bool:
        coordinator = self._sides[world.coordinator]
        ranks = [self._sides[key] for key in world.ranks if key is not None]
        return coordinator.phase == "run" and all(
            each.mode == "running" and each.seen == coordinator.generation for each in ranks
        )

    def _moves(self, world: World) -> Iterator[World]:
        for index, key in enumerate(world.ranks):
            if key is not None:
                yield from self._moves_of_rank(world, index)
        yield from self._moves_of_coordinator(world)
        if world.births:
            newcomer = self._make_rank(handle=f"{len(world.ranks)}.0")
            coordinator = self._of(world.coordinator)
            coordinator.join(len(world.ranks))
            yield world._replace(
                ranks=(*world.ranks, self._keep(newcomer)), coordinator=self._keep(coordinator), births=world.births - 1
            )

    def _with_rank(self, world: World, index: int, side: Any, **more: Any) -> World:
        ranks = (*world.ranks[:index], self._keep(side), *world.ranks[index + 1 :])
        return world._replace(ranks=ranks, **more)

    def _moves_of_rank(self, world: World, index: int) -> Iterator[World]:
        side: RankSide = self._of(world.ranks[index])
        if side.mode == "ready":
            message: Said = (index, "ready", side.seen, side.handle)
            if message not in world.said:
                yield world._replace(said=world.said | {message})
        if side.mode == "running" and (side.is_lost or side.should_regroup or self._fails(world, index, side)):
            yield self._left(world, index)
        if side.mode == "forming":
            assert side.order is not None
            if side.seen < self.generations:
                yield self._left(world, index)  # an attempt may always fail
            if self._forms_together(world, side.order):
                settled = self._of(world.ranks[index])
                settled.settle()
                said: Said = (index, "formed", settled.settled, "")
                yield self._with_rank(world, index, settled, said=world.said | {said})
        for asked in world.asked:
            if asked[0] == index:
                yield from self._hears(world, index, asked)
        # A death before the first generation ends the run.
        if world.deaths and self._sides[world.coordinator].generation:
            coordinator = self._of(world.coordinator)
            coordinator.remove([index])
            ranks = (*world.ranks[:index], None, *world.ranks[index + 1 :])
            yield world._replace(ranks=ranks, coordinator=self._keep(coordinator), deaths=world.deaths - 1)

    def _left(self, world: World, index: int) -> World:
        side: RankSide = self._of(world.ranks[index])
        side.leave()
        side.handle = f"{index}.{side.seen}"
        return self._with_rank(world, index, side)

    def _hears(self, world: World, index: int, asked: Asked) -> Iterator[World]:
        side: RankSide = self._of(world.ranks[index])
        _, kind, generation, handles = asked
        message = self._forms[generation, handles] if kind == "form" else {"kind": kind, "generation": generation}
        answer = side.hear(message)
        said = world.said
        if answer is not None:
            said = said | {(index, answer["kind"], answer["generation"], "")}
        following = self._with_rank(world, index, side, said=said)
        if following != world:
            yield following

    def _fails(self, world: World, index: int, side: RankSide) -> bool:
        """Whether a collective of a running rank fails: another member has died, or has closed its sockets."""
        assert side.order is not None
        for member in side.order["members"]:
            other = self._sides[world.ranks[member]] if world.ranks[member] is not None else None
            together = other is not None and other.mode != "ready" and other.seen == side.seen
            if not together:
                return True
        return False

    def _forms_together(self, world: World, order: dict[str, Any]) -> bool:
        for member in order["members"]:
            key = world.ranks[member]
            if key is None:
                return False
            other = self._sides[key]
            if other.mode == "ready" or other.seen != order["generation"]:
                return False
        return True

    def _moves_of_coordinator(self, world: World) -> Iterator[World]:
        for said in world.said:
            member, kind, generation, handle = said
            coordinator: CoordinatorSide = self._of(world.coordinator)
            progress = 0 if member < len(self.start.ranks) or generation > 0 else NEW
            coordinator.hear(
                member,
                {"kind": kind, "generation": generation, "handle": handle, "progress": progress, "digest": ""},
            )
            key = self._keep(coordinator)
            gone = world.said - {said} if kind == "formed" else world.said  # one that is said once may get lost
            if key != world.coordinator or gone != world.said:
                yield world._replace(coordinator=key, said=gone)
            if gone != world.said:
                yield world._replace(said=gone)
        coordinator = self._of(world.coordinator)
        may_form = coordinator.phase != "collect" or coordinator.generation < self.generations
        if may_form and coordinator.advance():
            if coordinator.order is not None and coordinator.phase == "form":
                self._forms[coordinator.generation, tuple(coordinator.order["handles"])] = coordinator.order
            yield world._replace(coordinator=self._keep(coordinator))
        for member, message in self._of(world.coordinator).messages():
            asked: Asked = (member, message["kind"], message["generation"], tuple(message.get("handles", ())))
            if asked not in world.asked:
                yield world._replace(asked=world.asked | {asked})
