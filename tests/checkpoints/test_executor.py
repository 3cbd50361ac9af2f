"""Saves in the background: one at a time, reliable ones all, of the others the newest."""

from __future__ import annotations

import threading

import pytest

from danling.checkpoints.executor import SaveExecutor


class _Gate:
    """A save that lasts until it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.go.wait(10)


def test_only_the_newest_of_the_unreliable_is_written() -> None:
    executor, gate, written, dropped = SaveExecutor(), _Gate(), list[int](), list[int]()
    executor.submit(gate, reliable=True)
    gate.started.wait(10)
    for number in range(5):
        executor.submit(lambda n=number: written.append(n), reliable=False, discard=lambda n=number: dropped.append(n))
    gate.go.set()
    assert executor.close()
    assert written == [4] and dropped == [0, 1, 2, 3]


def test_every_reliable_save_is_written_in_order_and_the_queue_is_bounded() -> None:
    executor, gate, written = SaveExecutor(capacity=2), _Gate(), list[int]()
    executor.submit(gate, reliable=True)
    gate.started.wait(10)
    executor.submit(lambda: written.append(0), reliable=True)
    executor.submit(lambda: written.append(1), reliable=False)
    executor.submit(lambda: written.append(2), reliable=True)
    third = threading.Thread(target=lambda: executor.submit(lambda: written.append(3), reliable=True))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.go.set()
    third.join(10)
    assert executor.close()
    assert written == [0, 2, 3]


def test_an_error_is_kept_once_and_the_next_save_is_written() -> None:
    class Severe(BaseException):
        pass

    def fail() -> None:
        raise Severe("disk")

    executor, written = SaveExecutor(), list[int]()
    executor.submit(fail, reliable=True)
    executor.submit(lambda: written.append(1), reliable=True)
    assert executor.wait(10)
    assert isinstance(executor.take_error(), Severe)
    assert executor.take_error() is None
    assert written == [1]
    assert executor.close()


def test_close_gives_up_in_time() -> None:
    executor, gate, written = SaveExecutor(), _Gate(), list[int]()
    executor.submit(gate, reliable=True)
    gate.started.wait(10)
    executor.submit(lambda: written.append(1), reliable=True)
    assert not executor.close(0.1)
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(lambda: None, reliable=True)
    gate.go.set()
    assert executor.wait(10)
    assert written == []
