"""A rank as a member: it listens to the coordinator in a thread, and forms its process group again when the membership changes."""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from danling.distributed import MembershipChanged

from .protocol import NEW, Message, RankSide
from .reconfigure import Group
from .wire import ADDRESS, JOINS, Closed, connect, machine_name

logger = logging.getLogger("danling")

_CONNECT_SECONDS = 60.0
_REPEAT_SECONDS, _LONGEST_REPEAT_SECONDS = 0.03, 1.0
_ENDED = 143
_LOST_WORDS = (
    "gloo",
    "connection closed",
    "reset by peer",
    "closed by peer",
    "timed out waiting",
    "connect timeout",
    "bad_alloc",
)
"""Parts of the errors of a collective whose other end is gone."""


class TrainingComplete(Exception):
    """The other members have finished the training: nothing is left to do."""


class RunEnded(SystemExit):
    """The coordinator has ended the run."""


@dataclass(frozen=True)
class Membership:
    """The members of one generation.

    Attributes:
        generation: Its number.
        rank: Rank of this process.
        members: Numbers for life of all members, by rank.
        leader: Rank of the member whose state counts.
        behind: Ranks of members that take over its state.
        fewer: Whether there are fewer members than the run needs, and no more come: it saves and ends.
        lost: What is known of the members that are gone.
    """

    generation: int
    rank: int
    members: tuple[int, ...]
    leader: int
    behind: tuple[int, ...]
    fewer: bool = False
    lost: tuple[dict[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)


class Member:
    """This process among the members of a run.

    Attributes:
        number: The number of this process for its life; a replacement has a new one.
        joins: Whether it has come after the run began.
        membership: The members now; `None` before the first `form`.

    Args:
        timeout: How long a collective waits for a member that neither answers nor ends.
        store: Returns a store that outlives every member.
    """

    def __init__(
        self, store: Callable[[], Any], *, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        address = os.environ.get(ADDRESS, "")
        if not address:
            raise ValueError(
                f"Expected a program that `danling run --ranks N -- python train.py` has started. Received: no {ADDRESS} in the "
                "environment. Start it with that command, or unset elastic.enabled."
            )
        self.joins = os.environ.get(JOINS) == "1"
        hello: dict[str, Any] = {"pid": os.getpid(), "host": machine_name()}
        if not self.joins:
            hello["member"] = int(os.environ["RANK"])
        self._channel, welcome = connect(address, hello, seconds=_CONNECT_SECONDS)
        self.number = int(welcome["member"])
        self.membership: Membership | None = None
        self._side = RankSide()
        self._changed = threading.Event()
        self._complete = False
        self._why: str | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="danling-member", daemon=True).start()
        self._group = Group(store(), self.number, timeout)
        self._side.handle = self._group.handle()

    # The listener

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.socket, selectors.EVENT_READ)
            while True:
                selector.select()
                try:
                    messages = self._channel.receive()
                except (Closed, ValueError):
                    # Without a coordinator no one replaces this rank, or ends it when it is left behind.
                    os._exit(_ENDED)
                for message in messages:
                    self._hear(message)

    def _hear(self, message: Message) -> None:
        if message["kind"] == "complete":
            self._complete = True
        elif message["kind"] == "end":
            self._why = str(message["why"])
        else:
            with self._lock:
                answer = self._side.hear(message)
            if answer is not None:
                self._channel.send(answer)
            elif message["kind"] in ("lost", "form"):
                # The main thread may be in the program for long, or send a large state: this one says that it lives.
                self._channel.send({"kind": "busy", "generation": message["generation"]})
        self._changed.set()

    # What the run says

    def say_trains(
        self,
        *,
        least: int = 1,
        wait_seconds: float = 60.0,
        fence_seconds: float = 15.0,
        replacements: int | None = None,
    ) -> None:
        """Say that this rank trains, so that it can be replaced from now on, and what the coordinator is to wait for.

        Args:
            least: Fewer ranks than this wait for more.
            wait_seconds: How long they do, and how long the answer of a rank is awaited.
            fence_seconds: How long a rank may be stopped while others wait for it.
            replacements: How many dead ranks are replaced; `None` for all.
        """
        settings = {
            "least": least,
            "wait_seconds": wait_seconds,
            "fence_seconds": fence_seconds,
            "replacements": replacements,
        }
        self._channel.send({"kind": "trains", "settings": settings})

    def say_committed(self) -> None:
        """Say that an update was made since the members changed."""
        self._channel.send({"kind": "committed"})

    def say_finished(self) -> None:
        """Say that this rank has finished the training, which its end is no change of."""
        self._channel.send({"kind": "finished"})

    def end_run(self, why: str) -> None:
        """Ask the coordinator to end the run on all ranks: `form` raises `RunEnded` then."""
        self._channel.send({"kind": "end_run", "why": why})

    # Changes

    def check(self) -> None:
        """Raise `MembershipChanged` if the membership is over."""
        if self._side.is_lost or self._why is not None:
            raise MembershipChanged

    @property
    def should_regroup(self) -> bool:
        """Whether others wait to be taken in at the next boundary; ranks may hear of it at different updates."""
        return self._side.should_regroup

    def form(
        self, progress: int | None, digest: Callable[[], str], take: Callable[[Membership], None]
    ) -> Membership:
        """Form the process group with the members that the coordinator names, and return the membership.

        Call it outside of `except`: an exception that is kept keeps the sockets of the old group open.

        Args:
            progress: Where this rank is, a number that grows with each commit; `None` without a state of the run.
            digest: Returns a text that is equal on ranks with equal states.
            take: Called when the group is connected: sends the state of the leader to those that are behind. What it raises gives the
                attempt up.

        Raises:
            TrainingComplete: If the others have finished.
            RunEnded: If the coordinator has ended the run.
        """
        text = digest() if progress is not None else ""
        while True:
            # A new handle for each attempt: an order that names an older one is not followed.
            handle = self._group.leave()
            with self._lock:
                self._side.leave()
                self._side.handle = handle
            order = self._await_order(NEW if progress is None else progress, text)
            membership = Membership(
                generation=int(order["generation"]),
                rank=order["members"].index(self.number),
                members=tuple(order["members"]),
                leader=int(order["leader"]),
                behind=tuple(order["behind"]),
                fewer=bool(order["fewer"]),
                lost=tuple(order.get("lost", ())),
            )
            if self._attempt(membership, order["handles"], float(order["patience"]), take):
                self.membership = membership
                self._channel.send(self._side.formed_message())
                return membership

    def _await_order(self, progress: int, digest: str) -> Message:
        seconds = _REPEAT_SECONDS
        while True:
            self._changed.clear()
            if self._why is not None:
                raise RunEnded(1)
            if self._complete:
                raise TrainingComplete
            with self._lock:
                order = self._side.order
                message = self._side.ready_message(progress, digest)
            if order is not None:
                return order
            self._channel.send(message)
            self._changed.wait(seconds)
            seconds = min(2 * seconds, _LONGEST_REPEAT_SECONDS)

    def _attempt(
        self,
        membership: Membership,
        handles: Sequence[str],
        patience: float,
        take: Callable[[Membership], None],
    ) -> bool:
        # Nothing of an exception may survive this method.
        try:
            self._group.form(membership.generation, handles, patience)
        except RuntimeError:
            return False
        try:
            take(membership)
        except MembershipChanged:
            return False
        except RuntimeError as error:
            if not is_lost_collective(error):
                raise
            return False
        with self._lock:
            if self._side.lost >= self._side.seen:
                return False
            self._side.settle()
        return True


def is_lost_collective(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other end is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST_WORDS)


def is_started_elastic() -> bool:
    """Whether `danling run` has started this process."""
    return bool(os.environ.get(ADDRESS))
