"""Calls that all ranks must make together: each rank notes its own in the store of the job, so that a call on some ranks only is named."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import distributed as dist

from danling.utils.messages import ranks_named
from danling.utils.process import is_gone, process_space

from .domain import default_store

logger = logging.getLogger("danling")

FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("train", "train_epochs", "train_steps", "train_epoch"), "training"),
    **dict.fromkeys(("evaluate", "evaluate_epoch", "evaluate_steps", "infer"), "evaluation"),
    "save_checkpoint": "save",
    **dict.fromkeys(("load_checkpoint", "load_pretrained"), "load"),
}
"""The calls, by what they do: a call within one of the same family is a part of it."""

_SECONDS_BEFORE_REPORT = 10.0
"""How long a rank waits at the beginning of a call before it says for which ranks."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.05
_SECONDS_BETWEEN_CHECKS = 0.25
"""How often a rank that waits looks whether those that it waits for can still come."""
_DEFAULT_LIMIT_SECONDS = 1800.0
_RAISED, _FAILED, _CLOSED = "raised", "failed", "closed"
"""What a rank notes after a call that failed, whose error it may catch, and at its end."""
_LONGEST_LIST = 64
"""Ranks whose calls are read."""
_OF_COLLECTIVES = (
    "gloo",
    "nccl",
    "closed by peer",
    "reset by peer",
    "timed out waiting",
    "connection was likely closed",
)
"""Parts of the errors that torch raises when a collective fails."""

_RUNNERS = itertools.count()


class CollectiveCallError(RuntimeError):
    """A collective failed while ranks were in different calls."""


class CollectiveCalls:
    """The calls of this rank, and what the others are in. Nothing is noted within an update.

    At its beginning a call waits until all ranks have begun it: its collectives would otherwise meet those of another call. If some ranks
    do not come within seconds, one line names them. If they can come no more, or not in the time of a collective, the call fails.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        limit: Returns how many seconds a collective may take; `None` where that is not known.
    """

    def __init__(self, rank: int, size: int, limit: Callable[[], float | None]) -> None:
        self._rank, self._size, self._limit = rank, size, limit
        self._store: Any = default_store()
        self._prefix = f"danling/calls/{next(_RUNNERS)}"
        self._open: list[str] = []
        self._counts: Counter[str] = Counter()
        self._has_loop = self._has_ended = False
        self._refusal = ""
        self._store.set(f"{self._prefix}/process/{rank}", f"{process_space()}:{os.getpid()}")
        self._note("")

    @classmethod
    def of(cls, rank: int, size: int, limit: Callable[[], float | None]) -> CollectiveCalls | None:
        """Return the calls of a runner; `None` without other ranks, or without a store, which ranks that MPI has started lack."""
        has_store = size > 1 and dist.is_initialized() and default_store() is not None
        return cls(rank, size, limit) if has_store else None

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Make a call inside, which all ranks must make.

        Raises:
            CollectiveCallError: If other ranks do not make it, or a collective in it fails while they are in another call.
            ValueError: If it is made in what `refusing` encloses.
        """
        if self._refusal:
            raise ValueError(f"Expected {name}() {self._refusal}")
        is_part = bool(self._open) and FAMILIES[self._open[-1]] == FAMILIES[name]
        if is_part or self._has_ended:
            yield
            return
        after = self._open[-1] if self._open else ""
        self._open.append(name)
        self._note(name)
        try:
            self._meet(name)
            with self.explaining():
                yield
        except Exception:
            # Not the end of this rank: it may catch the error, and come to the next call.
            after = after or _RAISED
            raise
        finally:
            self._open.pop()
            self._note(after)

    @contextmanager
    def refusing(self, refusal: str) -> Iterator[None]:
        """Refuse calls of all ranks inside, which not all ranks run: waiting for the others would end at the time limit of a collective.

        Args:
            refusal: The rest of the error, after "Expected the call()".
        """
        self._refusal = refusal
        try:
            yield
        finally:
            self._refusal = ""

    def note_loop(self) -> None:
        """Note that this rank trains by a loop of the user's, once."""
        if not self._has_loop:
            self._has_loop = True
            self._note("train_step")

    def end(self, *, failed: bool = False) -> None:
        """Note that the runner of this rank is closed; what comes after that is not noted."""
        if not self._has_ended:
            self._note(_FAILED if failed else _CLOSED)
            self._has_ended = True

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Name the calls of all ranks if a collective fails inside, and they are not the same."""
        try:
            yield
        except RuntimeError as error:
            is_explained = isinstance(error, CollectiveCallError)
            if is_explained or not any(text in str(error).lower() for text in _OF_COLLECTIVES):
                raise
            # The others are to find this rank in the call in which the collective failed.
            self._has_ended = True
            where = self.differences()
            # After a death or a failure the ranks are in different calls by chance.
            if not where or self._reason_to_give_up() or _in(_RAISED) in where:
                raise
            raise CollectiveCallError(
                f"A collective failed while the ranks were in different calls: {where}. Make each of these calls on all ranks, outside of "
                f"`if self.is_main_process`. ({error})"
            ) from error

    def differences(self, store: Any = None) -> str:
        """Return which ranks are in which call, if they are not all in the same one; else an empty text. No communication but the store's.

        Args:
            store: A connection for a thread that is not the one of the calls; `None` takes that of the calls.
        """
        try:
            # No new connection is made: if the process that has the store is gone, that would take as long as a collective may.
            entries = self._entries(self._store if store is None else store)
        except RuntimeError:
            return ""
        if _FAILED in entries.values() or len(set(entries.values())) == 1:
            return ""
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entry in entries.items():
            ranks[entry].append(rank)
        return "; ".join(f"{ranks_named(members)} {_in(entry)}" for entry, members in ranks.items())

    def _meet(self, name: str) -> None:
        """Wait until all ranks have begun a call."""
        family = FAMILIES[name]
        self._counts[family] += 1
        counter = f"{self._prefix}/{family}/{self._counts[family]}"
        limit = self._limit() or _DEFAULT_LIMIT_SECONDS
        began = time.monotonic()
        pause = _SHORTEST_PAUSE_SECONDS
        has_reported = False
        checks_at = began + _SECONDS_BETWEEN_CHECKS
        # A counter in the store and no collective, which would pair with whatever the others are in.
        arrived = self._store.add(counter, 1)
        while arrived < self._size:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            now = time.monotonic()
            if now >= checks_at:
                checks_at = now + _SECONDS_BETWEEN_CHECKS
                reason = self._reason_to_give_up()
                if not reason and now - began > limit:
                    reason = f"the others did not come within {limit:g} s"
                # One that came during the pause may have closed its runner since.
                arrived = self._store.add(counter, 0)
                if reason and arrived < self._size:
                    self._give_up(name, arrived, reason)
                if now - began > _SECONDS_BEFORE_REPORT and not has_reported:
                    has_reported = True
                    self._report(name, arrived, f"{counter}/reports")
            arrived = self._store.add(counter, 0)

    def _give_up(self, name: str, arrived: int, reason: str) -> NoReturn:
        where = self.differences()
        calls = f" ({where})" if where else ""
        by_itself = reason.endswith(("has died", _in(_FAILED)))
        fix = (
            "This follows from it"
            if by_itself
            else "Call it on all ranks, outside of `if self.is_main_process`"
        )
        # The others are to find this rank in the call that it gave up.
        self._has_ended = True
        raise CollectiveCallError(
            f"Expected {name}() on all {self._size} ranks. Received: {arrived}; {reason}{calls}. {fix}."
        )

    def _report(self, name: str, arrived: int, key: str) -> None:
        """Log which ranks are awaited, on the first of those that wait."""
        own = str(self._rank)
        speaker = bytes(self._store.compare_set(key, "", own)).decode()
        where = self.differences()
        if speaker == own and where:
            logger.warning(
                "%s() has begun on %d of %d ranks, which wait for the others: %s. Call it on all ranks, outside of "
                "`if self.is_main_process`.",
                name,
                arrived,
                self._size,
                where,
            )

    def _reason_to_give_up(self) -> str:
        """Return why a rank will not come any more; an empty text if all of them may."""
        try:
            for rank, entry in self._entries(self._store).items():
                if entry in (_FAILED, _CLOSED):
                    return f"rank {rank} {_in(entry)}"
                if self._has_died(rank):
                    return f"rank {rank} has died"
        except RuntimeError:
            return "the process that has the store of the job has died"
        return ""

    def _has_died(self, rank: int) -> bool:
        """Whether a process that this one can see has ended."""
        key = f"{self._prefix}/process/{rank}"
        if not self._store.check([key]):
            return False
        space, _, process = self._store.get(key).decode().rpartition(":")
        return space == process_space() and is_gone(int(process))

    def _note(self, entry: str) -> None:
        if self._has_ended:
            return
        try:
            self._store.set(f"{self._prefix}/rank/{self._rank}", entry)
        except RuntimeError:
            # Rank 0, which has the store, may have ended before this one; the collectives notice it.
            logger.debug("The store of the job does not answer.", exc_info=True)

    def _entries(self, store: Any) -> dict[int, str]:
        keys = {
            rank: f"{self._prefix}/rank/{rank}" for rank in range(min(self._size, _LONGEST_LIST))
        }
        if not store.check([*keys.values()]):
            # A rank is still on its way to its first call; `multi_get` would wait for it.
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        return {
            rank: bytes(entry).decode()
            for rank, entry in zip(keys, store.multi_get([*keys.values()]))
        }


def _in(entry: str) -> str:
    endings = {
        _CLOSED: "closed the runner",
        _FAILED: "has failed",
        _RAISED: "in none of the runner's calls, after one that failed",
        "": "in none of the runner's calls",
    }
    return endings.get(entry, f"in {entry}()")
