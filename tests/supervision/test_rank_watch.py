"""The watch of a rank: what it sees by the events of a training, machines by notes, a failure that ends it alone, and forks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.config import RunnerConfig
from danling.runners.state import TrainState
from danling.supervision import RankWatch


class Notes(dict[str, str]):
    """Notes of ranks that live in one process."""

    def write(self, key: str, text: str) -> None:
        self[key] = text

    def read(self, key: str) -> str | None:
        return self.get(key)


def runner_of(directory: Path, rank: int = 0, size: int = 2, **comm: Any) -> Any:
    return SimpleNamespace(
        config=RunnerConfig({"steps": 4, "comm": comm}),
        placement=SimpleNamespace(optimizer=SimpleNamespace(rank=rank, size=size)),
        state=SimpleNamespace(train=TrainState()),
        device=torch.device("cpu"),
        workspace=SimpleNamespace(dir=directory),
        is_main_process=rank == 0,
        _session=SimpleNamespace(training=3, running=True),
        _reporter=SimpleNamespace(rank_times=None),
    )


def watched(directory: Path, board: Any, rank: int = 0, seconds: float = 0.001, **more: Any) -> RankWatch:
    return RankWatch(runner_of(directory, rank), board=board, seconds=seconds, **more)


def until(found: Any) -> None:
    end = time.monotonic() + 20
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_events_say_which_part_of_a_training_is_under_way(tmp_path: Path) -> None:
    now = iter(range(100))
    watch = watched(tmp_path, Notes(), clock=lambda: float(next(now)))
    assert watch.look() == "computing"
    watch.batch_wait_started()
    assert watch.look() == "data"
    watch.batch_wait_ended()
    watch.evaluation_started("val")
    assert watch.look() == "evaluating"
    watch.save_started()
    assert watch.look() == "checkpointing"
    watch.save_ended()
    watch.evaluation_ended("val")
    assert watch.look() == "computing"
    watch._runner._session.running = False  # what is written at the end may take any time
    assert watch.look() == "checkpointing"
    assert watch.take() == ([1.0, 2.0, 0.0, 2.0, 1.0], 6) and watch.take()[1] == 0


def test_machines_are_known_where_they_are_wanted_and_looks_add_up(tmp_path: Path) -> None:
    board = Notes()
    board["host/1"] = "other 12"
    watch = watched(tmp_path, board)
    watch.training_started()
    assert watch._runner._reporter.rank_times is not None
    until(lambda: None not in watch.hosts())
    assert list(watch.hosts()) == [socket.gethostname(), "other"]
    until(lambda: watch.take()[1] > 2)
    watch.training_ended()
    watch.training_ended()
    watch.take()
    assert watch._runner._reporter.rank_times is None
    assert not [thread for thread in threading.enumerate() if thread.name == "danling-rank-watch"]
    silent = watched(tmp_path, Notes(), rank=1)
    silent.training_started()
    silent.training_ended()
    assert list(silent.hosts()) == [None, None]


def test_what_fails_in_it_ends_it_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Notes):
        def read(self, key: str) -> str | None:
            raise RuntimeError("out of order")

    with caplog.at_level(logging.ERROR, "danling"):
        watch = watched(tmp_path, Broken())
        watch.training_started()
        until(lambda: caplog.records)
    watch.training_ended()
    assert "training goes on without it" in caplog.text and "out of order" in caplog.text


def test_a_fork_goes_its_own_way(tmp_path: Path) -> None:
    watch = watched(tmp_path, Notes())
    watch.training_started()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            logging.getLogger("danling").debug("a worker speaks")
            os._exit(7 if [t for t in threading.enumerate() if t.name == "danling-rank-watch"] else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watch.training_ended()


def test_no_frame_is_kept_alive(tmp_path: Path) -> None:
    class Big:
        """Is gone when its function has returned."""

    gone = threading.Event()
    watch = watched(tmp_path, Notes())

    def hold() -> None:
        big = Big()
        __import__("weakref").finalize(big, gone.set)
        for _ in range(10):
            watch.look()

    hold()
    assert gone.is_set()
