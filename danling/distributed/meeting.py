"""Finding out without a collective whether all ranks have come to the same place, or leave it together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE_SECONDS = 0.02
_TOGETHER, _APART = "together", "apart"


def all_arrive(name: str, *, seconds: float) -> bool:
    """Return whether every rank of the job comes here within some seconds; each is told the same.

    A collective would hang, or pair with another one, where some ranks wait for each other elsewhere. May be called on some
    ranks only.

    Args:
        name: What the ranks come here for; used once.
        seconds: How long to wait for the others.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store, size = _get_default_store(), dist.get_world_size()
    arrived = f"danling/{name}/arrived"
    store.add(arrived, 1)
    end = time.monotonic() + seconds
    while store.add(arrived, 0) < size:
        if time.monotonic() > end:
            return _verdict(store, name, _APART) == _TOGETHER
        time.sleep(_PAUSE_SECONDS)
    return _verdict(store, name, _TOGETHER) == _TOGETHER


def _verdict(store: Store, name: str, proposed: str) -> str:
    """Return what the first rank has proposed: the last one may arrive at the instant at which another gives it up."""
    return bytes(store.compare_set(f"danling/{name}/verdict", "", proposed)).decode()


class JointLeave:
    """Leaving a wait on all ranks or on none, without a collective: a rank that does not have to wait never looks here.

    All have left when each of them has joined before any went on. Both are steps of one entry of the store, of which each is made whole.

    Args:
        store: What all ranks share; see `default_store`.
        name: Name of the wait; used once.
        rank: This rank.
        size: Number of ranks.
    """

    _STAY = b"stay"

    def __init__(self, store: Store, name: str, *, rank: int, size: int) -> None:
        self._store, self._key = store, f"danling/leave/{name}"
        self._rank, self._size = rank, size
        self._joined = False

    @property
    def joined(self) -> bool:
        """Whether this rank wants to leave."""
        return self._joined

    def is_asked_for(self) -> bool:
        """Return whether any rank wants to leave."""
        return bool(self._read())

    def join(self) -> bool:
        """Say that this rank would leave; return whether all do."""
        self._joined = True
        while True:
            before = self._read()
            ranks = set(before.split(b",")) if before else set()
            mine = str(self._rank).encode()
            if before == self._STAY or mine in ranks:
                return self._all(before)
            # With its own rank in it no other rank can have written it.
            after = b",".join(sorted({*ranks, mine}))
            if self._store.compare_set(self._key, before.decode(), after.decode()) == after:
                return self._all(after)

    def go_on(self) -> bool:
        """Say that this rank, which has joined, has nothing to wait for any more; return `False` where all leave already."""
        while True:
            before = self._read()
            if before == self._STAY or self._all(before):
                return before == self._STAY
            if self._store.compare_set(self._key, before.decode(), self._STAY.decode()) == self._STAY:
                return True

    def _all(self, value: bytes) -> bool:
        return value != self._STAY and len(value.split(b",")) == self._size

    def _read(self) -> bytes:
        return bytes(self._store.get(self._key)) if self._store.check([self._key]) else b""


def default_store() -> Store:
    """Return the store that all ranks of the job share."""
    return _get_default_store()
