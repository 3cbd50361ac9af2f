"""All ranks leave a wait, or none does."""

from __future__ import annotations

import random
import threading

import pytest
from torch._C._distributed_c10d import HashStore

from danling.distributed import JointLeave


def rounds(size: int) -> list[JointLeave]:
    """Return what each rank holds of one wait."""
    store = HashStore()
    return [JointLeave(store, "here", rank=rank, size=size) for rank in range(size)]


def test_all_leave_when_the_last_one_has_joined() -> None:
    ranks = rounds(3)
    assert not any(rank.is_asked_for() for rank in ranks)
    assert [ranks[2].join(), ranks[0].join()] == [False, False]
    assert ranks[1].is_asked_for()
    assert ranks[1].join()
    assert all(rank.join() for rank in ranks)
    assert not any(rank.go_on() for rank in ranks)


def test_none_leaves_where_one_went_on_before() -> None:
    ranks = rounds(2)
    ranks[0].join()
    assert ranks[0].go_on()
    assert [ranks[1].join(), ranks[1].go_on()] == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_all_come_to_one_end(seed: int) -> None:
    ranks, ends = rounds(4), [""] * 4
    chance = random.Random(seed)
    plans = [[chance.random() < 0.7 for _ in range(6)] for _ in ranks]
    barrier = threading.Barrier(len(ranks))

    def run(number: int) -> None:
        rank = ranks[number]
        barrier.wait()
        for waits in plans[number]:
            if rank.join():
                ends[number] = "left"
                return
            if not waits:
                break
        ends[number] = "went on" if rank.go_on() else "left"

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(ends) in ({"left"}, {"went on"})
