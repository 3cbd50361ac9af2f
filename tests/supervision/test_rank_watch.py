"""The thread that watches a rank, by itself: machines are told, a failure ends it alone, and a fork has none of it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import pytest

from danling.supervision import ActivitySampler, RankWatch, StackReader


class Notes(dict[str, str]):
    """Notes of ranks that live in one process."""

    def write(self, key: str, text: str) -> None:
        self[key] = text

    def read(self, key: str) -> str | None:
        return self.get(key)


def watched(board: Any, rank: int = 0, **more: Any) -> RankWatch:
    sampler = ActivitySampler(StackReader({}), thread=threading.get_ident(), native_id=threading.get_native_id())
    given = {"rank": rank, "size": 2, "gathers": rank == 0, "seconds": 0.001, **more}
    return RankWatch(sampler, board=board, **given)


def until(found: Any) -> None:
    end = time.monotonic() + 20
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_machines_are_known_where_they_are_wanted_and_looks_add_up() -> None:
    board = Notes()
    board["host/1"] = "other 12"
    watch = watched(board)
    watch.start()
    until(lambda: None not in watch.hosts())
    assert list(watch.hosts()) == [socket.gethostname(), "other"]
    until(lambda: watch.sampler.take()[1] > 2)
    watch.stop()
    watch.stop()
    watch.sampler.take()
    time.sleep(0.01)
    assert watch.sampler.take()[1] == 0 and not [t for t in threading.enumerate() if t.name == "danling-rank-watch"]
    silent = watched(Notes(), rank=1)
    silent.start()
    silent.stop()
    assert list(silent.hosts()) == [None, None]


def test_what_fails_in_it_ends_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def check(self) -> None:
            raise RuntimeError("out of order")

        def close(self) -> None:
            """Have nothing to close."""

    with caplog.at_level(logging.ERROR, "danling"):
        watch = watched(Notes(), checks=[Broken()])
        watch.start()
        until(lambda: caplog.records)
    watch.stop()
    assert "training goes on without it" in caplog.text and "out of order" in caplog.text


def test_a_fork_goes_its_own_way() -> None:
    watch = watched(Notes())
    watch.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            logging.getLogger("danling").debug("a worker speaks")
            os._exit(7 if [t for t in threading.enumerate() if t.name == "danling-rank-watch"] else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watch.stop()
