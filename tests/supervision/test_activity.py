"""What a thread is seen to do, from beside it: threads that really compute, sleep, and wait in what looks like communication."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from danling.supervision.activity import ActivitySampler, StackReader, ThreadSleep

TORCH = Path(torch.__file__).parent
COLLECTIVE = str(TORCH / "distributed" / "distributed_c10d.py")


def made_in(file: str, source: str, **names: Any) -> dict[str, Any]:
    """Return what a source defines that says to stand in a file."""
    exec(compile(source, file, "exec"), names)
    return names


def saved(go: Callable[[], None]) -> None:
    go()


def evaluated(go: Callable[[], None]) -> None:
    saved(go)


class Stage:
    """A thread that does something until it is told to end."""

    def __init__(self, go: Callable[[threading.Event], None]) -> None:
        self.end = threading.Event()
        self.thread = threading.Thread(target=go, args=(self.end,), daemon=True)
        self.thread.start()

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self.thread.ident or 0)


@contextmanager
def on_stage(go: Callable[[threading.Event], None]) -> Iterator[Stage]:
    stage = Stage(go)
    try:
        yield stage
    finally:
        stage.end.set()
        stage.thread.join()


def settles(found: Callable[[], object], expected: object) -> bool:
    end = time.monotonic() + 20
    while found() != expected:
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def spin(end: threading.Event) -> None:
    while not end.is_set():
        pass


WAITING = "def all_reduce(go): go()"
CASES = [
    (COLLECTIVE, threading.Event.wait, "waiting"),
    # A copy out of a buffer stands there as well, and takes the processor.
    (COLLECTIVE, spin, "computing"),
    ("/home/me/train.py", threading.Event.wait, "computing"),
    (str(TORCH / "nn" / "functional.py"), threading.Event.wait, "computing"),
    (str(TORCH / "nn" / "parallel" / "distributed.py"), threading.Event.wait, "waiting"),
]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel has no table of threads")
@pytest.mark.parametrize(("file", "inside", "expected"), CASES)
def test_it_waits_who_sleeps_in_communication(file: str, inside: Callable[..., object], expected: str) -> None:
    source = "def outer(end): inner(end)" if inside is threading.Event.wait else made_in_spin()
    names = made_in(file, source, inner=inside)
    with on_stage(names["outer"]) as stage:
        sleeps = ThreadSleep(stage.thread.native_id or 0)
        assert settles(lambda: StackReader({}).activity(stage.frame(), sleeps), expected)
        sleeps.close()
        assert sleeps() is None


def made_in_spin() -> str:
    return "def outer(end):\n    while not end.is_set(): pass"


def test_the_innermost_part_that_is_known_counts() -> None:
    def go(end: threading.Event) -> None:
        evaluated(lambda: (end.wait(), None)[1])

    with on_stage(go) as stage:
        for parts, expected in (
            ({evaluated: "evaluating"}, "evaluating"),
            ({evaluated: "evaluating", saved: "checkpointing"}, "checkpointing"),
            ({print: "data"}, "computing"),
        ):
            reader = StackReader(parts)
            assert settles(lambda reader=reader: reader.activity(stage.frame(), lambda: True), expected)
    assert StackReader({}).activity(None, lambda: True) == "computing"


def test_a_backward_waits_only_where_the_kernel_says_that_it_sleeps() -> None:
    names = made_in(str(TORCH / "autograd" / "graph.py"), "def _engine_run_backward(end): end.wait()")
    with on_stage(names["_engine_run_backward"]) as stage:
        here, there = StackReader({}), StackReader({}, on_accelerator=True)
        assert settles(lambda: here.activity(stage.frame(), lambda: True), "waiting")
        assert here.activity(stage.frame(), lambda: False) == here.activity(stage.frame(), lambda: None) == "computing"
        # Its threads compute for the one that sleeps.
        assert there.activity(stage.frame(), lambda: True) == "computing"


def test_seconds_add_up_by_what_was_seen() -> None:
    now = iter([0.0, 1.0, 3.0, 3.5])
    me = threading.get_ident()
    sampler = ActivitySampler(StackReader({}), thread=me, native_id=threading.get_native_id(), clock=lambda: next(now))
    assert [sampler.look(), sampler.look()] == ["computing"] * 2
    seconds, looks = sampler.take()
    assert list(seconds) == [0.0, 3.0, 0.0, 0.0, 0.0] and looks == 2
    sampler.look()
    assert sampler.take() == ([0.0, 0.5, 0.0, 0.0, 0.0], 1)
    sampler.close()


def test_no_frame_is_kept_alive() -> None:
    class Big:
        """Is gone when its function has returned."""

    gone = threading.Event()

    def go(end: threading.Event) -> None:
        def hold() -> None:
            big = Big()
            __import__("weakref").finalize(big, gone.set)
            end.wait()

        hold()

    stage = Stage(go)
    sampler = ActivitySampler(StackReader({}), thread=stage.thread.ident or 0, native_id=stage.thread.native_id or 0)
    for _ in range(10):
        sampler.look()
    stage.end.set()
    stage.thread.join()
    assert gone.is_set()
    sampler.close()


def test_a_thread_that_is_not_there_is_no_error() -> None:
    sleeps = ThreadSleep(2**22 + os.getpid())
    assert sleeps() is None
