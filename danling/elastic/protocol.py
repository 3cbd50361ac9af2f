"""How ranks agree on who takes part: two automata without sockets, threads or clocks, which a test runs through every interleaving.

A *generation* is one membership. Every message has its generation, and may be lost, late or doubled: each side repeats what is not
answered, and an answer that comes twice changes nothing.

    rank:         RUNNING(g) --error, or "lost g"--> READY(g): its sockets are closed, it repeats "ready"
                  READY --"form g'" with its handle--> FORMING(g') --> RUNNING(g'), which says "formed g'", or READY(g')
    coordinator:  RUN --a death, or a member is ready--> COLLECT: repeats "lost g" until every living member is READY(g)
                  --> FORM(g+1): repeats "form g+1" until all have formed --> RUN
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""Plain values with a `kind`."""

NEW = -1
"""Progress of a member that has no state of the run yet."""


@dataclass
class RankSide:
    """What a rank knows of its membership.

    Attributes:
        mode: Whether it is ready for a generation, tries to form one, or runs in one.
        seen: The generation that it runs in, or was in or tried last.
        lost: The newest generation that the coordinator has called lost.
        settled: The newest generation that it has formed.
        handle: What the others connect to, made for one attempt.
        order: The message "form" that it follows.
        regroups: The generation in which members wait to be taken in at the next boundary.
    """

    mode: Literal["ready", "forming", "running"] = "ready"
    seen: int = 0
    lost: int = -1
    settled: int = 0
    handle: str = ""
    order: Message | None = None
    regroups: int = -1

    @property
    def is_lost(self) -> bool:
        """Whether the generation that this rank is in is over."""
        return self.mode == "running" and self.lost >= self.seen

    @property
    def should_regroup(self) -> bool:
        """Whether others are to be taken in at the next boundary."""
        return self.mode == "running" and self.regroups == self.seen

    def hear(self, message: Message) -> Message | None:
        """Take a message of the coordinator, and return the answer to it."""
        kind, generation = message["kind"], int(message["generation"])
        if kind == "lost":
            self.lost = max(self.lost, generation)
            if self.mode == "ready":
                # The form of that generation never came, and is given up: else each side would wait for the other.
                self.seen = max(self.seen, self.lost)
        elif kind == "regroup":
            self.regroups = max(self.regroups, generation)
        elif kind == "form":
            if generation <= self.settled:
                return self.formed_message()  # the first answer may have been lost
            if (
                self.mode == "ready"
                and generation > self.seen
                and self.handle in message["handles"]
            ):
                self.mode, self.order, self.seen = "forming", message, generation
        return None

    def leave(self) -> None:
        """Leave a generation that has failed, or is lost."""
        self.mode, self.order = "ready", None

    def settle(self) -> None:
        """Run in the generation that was formed."""
        self.mode, self.settled = "running", self.seen

    def ready_message(self, progress: int, digest: str) -> Message:
        """Return what a ready rank repeats."""
        return {
            "kind": "ready",
            "generation": self.seen,
            "handle": self.handle,
            "progress": progress,
            "digest": digest,
        }

    def formed_message(self) -> Message:
        """Return what is said of a generation that was formed."""
        return {"kind": "formed", "generation": self.settled}


@dataclass(frozen=True)
class Ready:
    """What a member that is ready has said."""

    generation: int
    handle: str
    progress: int
    digest: str


class StatesDiffer(RuntimeError):
    """Members at the same position of the run have different states: a chip, or a program, has changed one of them alone."""


class StateLost(RuntimeError):
    """Every member that had the state of the run has died."""


@dataclass
class CoordinatorSide:
    """What the coordinator knows of all members, and what it asks of them.

    Attributes:
        expected: Members that the first generation waits for.
        least: Fewer living members than this do not form a generation, unless `accepts_fewer`.
        phase: See the module.
        generation: The newest generation.
        roster: Its members.
        living: All members that have come and neither died nor left.
        ready: What those said last that are ready.
        formed: The newest generation that each has formed.
        order: The message "form" of the newest generation.
        patience: Seconds that an attempt to connect may take.
        accepts_fewer: Whether the time to wait for more members is over.
    """

    expected: int
    least: int = 1
    phase: Literal["collect", "form", "run"] = "collect"
    generation: int = 0
    roster: tuple[int, ...] = ()
    living: set[int] = field(default_factory=set)
    ready: dict[int, Ready] = field(default_factory=dict)
    formed: dict[int, int] = field(default_factory=dict)
    order: Message | None = None
    patience: float = 0.5
    accepts_fewer: bool = False

    # What happens

    def join(self, member: int) -> None:
        """Take in a member that has come."""
        self.living.add(member)

    def remove(self, members: Iterable[int]) -> None:
        """Forget members that have died or left."""
        for member in members:
            self.living.discard(member)
            self.ready.pop(member, None)
            self.formed.pop(member, None)
            if member in self.roster and self.phase != "collect":
                self._collect()

    def hear(self, member: int, message: Message) -> None:
        """Take a message of a member."""
        if member not in self.living:
            return
        generation = int(message["generation"])
        if message["kind"] == "formed":
            self.formed[member] = max(generation, self.formed.get(member, 0))
        elif message["kind"] == "ready":
            before = self.ready.get(member)
            if before is None or generation >= before.generation:
                said = Ready(
                    generation, message["handle"], int(message["progress"]), message["digest"]
                )
                self.ready[member] = said
            is_of_now = generation == self.generation and member in self.roster
            if is_of_now and self.phase != "collect":
                if self.phase == "form":
                    # An attempt failed though no one has died: the machine is slow.
                    self.patience = min(16.0, 2 * self.patience)
                self._collect()

    def _collect(self) -> None:
        self.phase, self.order = "collect", None

    # What follows

    @property
    def members(self) -> list[int]:
        """Living members of the newest generation."""
        return [member for member in self.roster if member in self.living]

    @property
    def newcomers(self) -> list[int]:
        """Members that are ready and in no generation yet."""
        return sorted(
            member for member in self.living.difference(self.roster) if member in self.ready
        )

    @property
    def awaited(self) -> list[int]:
        """Members whose answer the others wait for."""
        if self.phase == "collect":
            return [
                member for member in self.members if not self._is_ready(member, self.generation)
            ]
        if self.phase == "form":
            return [member for member in self.members if self.formed.get(member) != self.generation]
        return []

    def _is_ready(self, member: int, generation: int) -> bool:
        said = self.ready.get(member)
        return said is not None and said.generation == generation

    @property
    def _taking_part(self) -> list[int]:
        # One that has been in a generation and was left out of a later one does not come back.
        wanted = dict.fromkeys(self.roster, self.generation)
        return sorted(
            member for member in self.living if self._is_ready(member, wanted.get(member, 0))
        )

    @property
    def lacks_members(self) -> bool:
        """Whether every living member is ready and there are too few."""
        least = self.least if self.generation else self.expected
        return self.phase == "collect" and not self.awaited and len(self._taking_part) < least

    def advance(self) -> bool:
        """Go on to the next phase if everything for it is there; return whether the phase has changed.

        Raises:
            StateLost: If no living member has the state.
            StatesDiffer: If members at one position have different states.
        """
        if self.phase == "form" and not self.awaited:
            # Back to the usual patience by and by: a slow machine stays slow for a while.
            self.phase, self.patience = "run", max(1.0, 0.7 * self.patience)
            return True
        if self.phase != "collect" or self.awaited:
            return False
        if self.lacks_members and not (self.accepts_fewer and self.generation):
            if self.generation and not self.members:
                raise StateLost(
                    "Every rank that had the state of the run has died. Start the command again with auto_resume: it continues from the "
                    "newest checkpoint."
                )
            return False
        taking_part = self._taking_part
        if not taking_part:
            return False
        self._begin_form(taking_part)
        return True

    def _begin_form(self, taking_part: list[int]) -> None:
        said = {member: self.ready[member] for member in taking_part}
        furthest = max(each.progress for each in said.values())
        if self.generation and furthest == NEW:
            raise StateLost(
                "Every rank that had the state of the run has died. Start the command again with auto_resume: it continues from the newest "
                "checkpoint."
            )
        digests: dict[int, set[str]] = {}
        for each in said.values():
            if each.progress != NEW:
                digests.setdefault(each.progress, set()).add(each.digest)
        differing = [progress for progress, found in digests.items() if len(found) > 1]
        if differing:
            raise StatesDiffer(
                f"Expected one state on all ranks after {differing[0]} updates. Received: {len(digests[differing[0]])}. A chip, or a "
                "program that treats its ranks differently, has changed one of them alone. Nothing was saved since; start again from the "
                "newest checkpoint."
            )
        # The lowest of those that are furthest, so that a rank 0 that is not behind stays the one that leads.
        leader = next(
            index for index, member in enumerate(taking_part) if said[member].progress == furthest
        )
        self.generation += 1
        self.roster = tuple(taking_part)
        self.formed = {}
        self.order = {
            "kind": "form",
            "generation": self.generation,
            "handles": [said[member].handle for member in taking_part],
            "members": taking_part,
            "leader": leader,
            "behind": [
                index
                for index, member in enumerate(taking_part)
                if said[member].progress < furthest
            ],
            "patience": self.patience,
            "fewer": len(taking_part) < self.least,
        }
        self.phase = "form"

    def repeated(self) -> tuple[list[int], Message]:
        """Return to which members something is repeated now, and what."""
        if self.phase == "collect":
            return self.awaited, {"kind": "lost", "generation": self.generation}
        if self.phase == "form":
            assert self.order is not None
            return self.awaited, self.order
        return self.members if self.newcomers else [], {
            "kind": "regroup",
            "generation": self.generation,
        }
