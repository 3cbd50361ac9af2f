"""Waits for a stream, which all ranks leave together when one of them is asked to stop."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

from danling.distributed import Domain, agree, default_store
from danling.training.session import EndOfPass, TrainingSession

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SECONDS_BETWEEN_LOOKS = 0.5
"""How often a rank that waits looks whether another one was asked to stop."""


class Waits:
    """The waits of one rank for a stream.

    Args:
        session: The session of the run.
        domain: The ranks that wait for the same samples.
    """

    def __init__(self, session: TrainingSession, domain: Domain) -> None:
        self._session = session
        self._domain = domain
        self._leaving: tuple[str, CollectiveExit] | None = None
        self._looks_again = -math.inf

    def leave_if_asked(self, place: int) -> None:
        """Leave a wait for batches that a rank was asked to stop in, where all ranks wait for the same ones. May be called on one rank."""
        session, domain = self._session, self._domain
        if not session.running:
            return
        if domain.size == 1:
            if session.asked_to_stop():
                self._leave()
            return
        leave = self._leave_of(place)
        if self._is_asked(leave) and leave.join():
            self._leave()

    def stops(self, place: int) -> bool:
        """Return whether this rank was asked to stop, which it tells the others, or another one has told so. May be called on one rank.

        For ranks that come to one place by themselves, where they agree on it: one that waits for something on its way must not keep the
        others waiting there.
        """
        if self._domain.size == 1:
            return self._session.asked_to_stop()
        leave = self._leave_of(place)
        is_asked = self._is_asked(leave)
        if is_asked and not leave.joined:
            leave.join()
        return is_asked

    def end(self) -> None:
        """Continue after a wait, unless all ranks have agreed to leave it meanwhile. May be called on one rank."""
        leave, self._leaving = self._leaving, None
        if leave is not None and leave[1].joined and not leave[1].go_on():
            self._leave()

    def _is_asked(self, leave: CollectiveExit) -> bool:
        if self._session.asked_to_stop() or leave.joined:
            return True
        # The store is one process for all ranks: they do not all ask it at every look.
        now = time.monotonic()
        if now < self._looks_again:
            return False
        self._looks_again = now + _SECONDS_BETWEEN_LOOKS
        return leave.is_asked_for()

    def _leave_of(self, place: int) -> CollectiveExit:
        name = f"{self._session.training}/{place}"
        if self._leaving is None or self._leaving[0] != name:
            exit = CollectiveExit(
                default_store(), name, rank=self._domain.rank, size=self._domain.size
            )
            self._leaving = name, exit
        return self._leaving[1]

    def _leave(self) -> NoReturn:
        # All ranks are here now.
        self._session.apply_requests(agree(self._domain, self._session.local_requests()))
        raise EndOfPass


class CollectiveExit:
    """Leaving a wait on all ranks or on none, without a collective: a rank that does not have to wait never looks here.

    One entry of the store lists the ranks that have joined, until one of them replaces the list by the word that all stay. All leave if
    each rank was listed before.

    Attributes:
        joined: Whether this rank wants to leave.
    """

    _STAY = "stay"

    def __init__(self, store: Store, name: str, *, rank: int, size: int) -> None:
        self._store = store
        self._key = f"danling/leave/{name}"
        self._rank = str(rank)
        self._size = size
        self.joined = False

    def _read(self) -> str:
        return bytes(self._store.get(self._key)).decode() if self._store.check([self._key]) else ""

    def is_asked_for(self) -> bool:
        """Return whether any rank wants to leave."""
        return bool(self._read())

    def join(self) -> bool:
        """Say that this rank would leave; return whether all do."""
        self.joined = True
        while (before := self._read()) != self._STAY:
            joined = {*before.split(","), self._rank} - {""}
            after = ",".join(sorted(joined))
            # In a list without this rank's own number no other rank can have written it.
            if (
                after == before
                or bytes(self._store.compare_set(self._key, before, after)).decode() == after
            ):
                return len(joined) == self._size
        return False

    def go_on(self) -> bool:
        """Say that this rank, which has joined, has nothing to wait for any more; return `False` where all leave already."""
        # Until its word is there, or all have joined: another rank may change the list meanwhile.
        while (before := self._read()) != self._STAY:
            if len(before.split(",")) == self._size:
                return False
            self._store.compare_set(self._key, before, self._STAY)
        return True
