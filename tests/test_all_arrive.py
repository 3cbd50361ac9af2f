"""All ranks come to a place in time, or each is told that they do not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from danling.distributed import all_arrive, domain


class Hesitant:
    """A store whose rank stands still behind the look that finds another one missing, until that one has gone on."""

    def __init__(self, store: HashStore, other: Any) -> None:
        self._store = store
        self._other = other

    def add(self, key: str, number: int) -> int:
        found = self._store.add(key, number)
        if number == 0:
            self._other()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Two ranks in threads of this process, each with its own view of one store."""
    own = threading.local()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(domain, "_get_default_store", lambda: own.store)
    return own


def test_one_that_comes_at_the_instant_at_which_it_is_given_up_is_told_the_same(stores: threading.local) -> None:
    shared, told = HashStore(), []

    def last() -> None:
        stores.store = shared
        told.append(all_arrive("here", seconds=60))

    def comes() -> None:
        if not told:
            thread = threading.Thread(target=last)
            thread.start()
            thread.join()

    stores.store = Hesitant(shared, comes)
    assert all_arrive("here", seconds=-1) == told[0]


def test_one_that_comes_later_is_told_that_it_was_given_up(stores: threading.local) -> None:
    stores.store = HashStore()
    assert [all_arrive("here", seconds=-1), all_arrive("here", seconds=60)] == [False, False]
    assert [all_arrive("there", seconds=-1) for _ in range(2)] == [False, False]
