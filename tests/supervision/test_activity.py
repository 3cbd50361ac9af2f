"""Whether a thread is seen to wait: threads that really compute, sleep, and wait in what looks like communication."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from danling.supervision.rank_watch import WatchedThread

TORCH = Path(torch.__file__).parent
COLLECTIVE = str(TORCH / "distributed" / "distributed_c10d.py")


def made_in(file: str, source: str, **names: Any) -> dict[str, Any]:
    """Return what a source defines that says to stand in a file."""
    exec(compile(source, file, "exec"), names)
    return names


class Stage:
    """A thread that does something until it is told to end."""

    def __init__(self, go: Callable[[threading.Event], None]) -> None:
        self.end = threading.Event()
        self.thread = threading.Thread(target=go, args=(self.end,), daemon=True)
        self.thread.start()


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
    (COLLECTIVE, threading.Event.wait, True),
    # A copy out of a buffer stands there as well, and takes the processor.
    (COLLECTIVE, spin, False),
    ("/home/me/train.py", threading.Event.wait, False),
    (str(TORCH / "nn" / "functional.py"), threading.Event.wait, False),
    (str(TORCH / "nn" / "parallel" / "distributed.py"), threading.Event.wait, True),
]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel has no table of threads")
@pytest.mark.parametrize(("file", "inside", "expected"), CASES)
def test_it_waits_who_sleeps_in_communication(file: str, inside: Callable[..., object], expected: bool) -> None:
    source = "def outer(end): inner(end)" if inside is threading.Event.wait else made_in_spin()
    names = made_in(file, source, inner=inside)
    with on_stage(names["outer"]) as stage:
        thread = WatchedThread(stage.thread)
        assert settles(lambda: thread.waits(thread.frame()), expected)
        thread.close()
        assert thread.sleeps() is None


def made_in_spin() -> str:
    return "def outer(end):\n    while not end.is_set(): pass"


def test_a_backward_waits_only_where_the_kernel_says_that_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    names = made_in(str(TORCH / "autograd" / "graph.py"), "def _engine_run_backward(end): end.wait()")
    with on_stage(names["_engine_run_backward"]) as stage:
        here, there = WatchedThread(stage.thread), WatchedThread(stage.thread, on_accelerator=True)
        assert settles(lambda: here.waits(here.frame()), True)
        # Its threads compute for the one that sleeps.
        assert not there.waits(there.frame())
        for asleep in (False, None):
            monkeypatch.setattr(WatchedThread, "sleeps", lambda self, asleep=asleep: asleep)
            assert not here.waits(here.frame())
