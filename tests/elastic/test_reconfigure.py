"""What elastic ranks rely on in torch's experimental interface: each fact is read from the torch that runs."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from support.processes import run_processes
from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from danling.elastic.reconfigure import Group

_TIMEOUT = timedelta(seconds=60)
_PATIENCE = 30.0
_SOON = 10.0
"""Far less than the timeout of a collective."""


def _store() -> Store:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
    )


class _Ranks:
    """The group of this process, and handles exchanged over the store."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = _store()
        self.group = Group(self.store, self.rank + 10, _TIMEOUT)

    def handles(self, generation: int, handle: str, ranks: range) -> list[str]:
        self.store.set(f"handle/{generation}/{self.rank}", handle)
        return [self.store.get(f"handle/{generation}/{rank}").decode() for rank in ranks]

    def form(self, generation: int, ranks: range | None = None) -> None:
        handle, members = self.group.leave(), ranks or range(self.size)
        self.group.form(generation, self.handles(generation, handle, members), _PATIENCE)
        # One that leaves at once closes sockets to which another one still connects.
        self.store.add(f"formed/{generation}", 1)
        while self.store.add(f"formed/{generation}", 0) < len(members):
            time.sleep(0.01)

    def end(self) -> None:
        # The store is rank 0's.
        self.store.add("ended", 1)
        while self.rank == 0 and self.store.add("ended", 0) < self.size:
            time.sleep(0.01)


def _sum() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def _formed_in_order() -> tuple[bool, bool, int, int, float]:
    ranks = _Ranks()
    try:
        _sum()
        is_connected = True
    except Exception:
        is_connected = False
    before = ranks.group.leave()
    ranks.group.form(1, ranks.handles(1, before, range(2))[::-1], _PATIENCE)
    found = (
        is_connected,
        ranks.group.handle() != before,
        dist.get_rank(),
        dist.get_world_size(),
        _sum(),
    )
    ranks.end()
    return found


def test_list_of_handles_gives_ranks_by_position() -> None:
    assert run_processes(_formed_in_order) == [(False, True, 1, 2, 2.0), (False, True, 0, 2, 2.0)]


def _left_alone(keeps: bool) -> float:
    """Return how long the second rank waits for the first, which fails and leaves; the third has gone before."""
    ranks = _Ranks()
    ranks.form(1)
    if ranks.rank == 2:
        ranks.group.leave()
        ranks.end()
        return 0.0
    began = time.monotonic()
    kept: list[BaseException] = []
    try:
        _sum()
    except RuntimeError as error:
        if keeps and ranks.rank == 0:
            kept.append(error)
    if ranks.rank == 0:
        ranks.group.leave()
        if keeps:
            time.sleep(_SOON)
            kept.clear()
    ranks.end()
    return time.monotonic() - began


def test_rank_that_leaves_wakes_those_that_wait_for_it() -> None:
    waited = run_processes(_left_alone, False, world_size=3)
    assert max(waited) < _SOON


@pytest.mark.slow
def test_exception_that_is_kept_keeps_others_waiting() -> None:
    waited = run_processes(_left_alone, True, world_size=3)
    assert max(waited) >= _SOON


def _twice() -> str:
    ranks = _Ranks()
    ranks.form(1)
    handle = ranks.group.leave()
    handles = ranks.handles(2, handle, range(2))
    try:
        ranks.group.form(1, handles, 1.0)
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    # Nothing has changed: the next one forms.
    ranks.form(3)
    assert _sum() == 2.0
    ranks.end()
    return message


def test_number_of_a_generation_is_refused_twice() -> None:
    assert any("already used" in message for message in run_processes(_twice))


def _without_one() -> tuple[int, float, list[int]]:
    ranks = _Ranks()
    ranks.form(1)
    if ranks.rank == 2:
        # Not by an end of the process, which a test would count as a failure.
        ranks.group.leave()
        ranks.end()
        return 0, 0.0, []
    ranks.form(2, range(2))
    gathered: list[int] = [0, 0]
    dist.all_gather_object(gathered, ranks.rank)
    found = dist.get_world_size(), _sum(), gathered
    dist.barrier()
    ranks.end()
    return found


def test_group_forms_without_a_member() -> None:
    assert run_processes(_without_one, world_size=3)[:2] == [(2, 2.0, [0, 1])] * 2


def test_torch_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from danling.elastic import reconfigure

    monkeypatch.delattr(dist, "_reconfigure")
    with pytest.raises(ValueError, match=f"torch {reconfigure.OLDEST} or newer"):
        reconfigure.check_supported()
