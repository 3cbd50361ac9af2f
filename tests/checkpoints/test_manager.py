"""Saves in the background: one at a time, reliable ones all, of the others the newest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_processes

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointSettings,
    FileCheckpointManager,
)
from danling.checkpoints.manager import SaveExecutor
from danling.distributed import Domain


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
    with pytest.raises(RuntimeError, match="after close"):
        executor.submit(lambda: None, reliable=True)
    gate.go.set()
    assert executor.wait(10)
    assert written == []


# What one rank raises, all ranks raise

GOOD = "What was complete before was not touched"


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("odd")
        self.held = lambda: None


def _raise(error: BaseException) -> Any:
    raise error


def _met_by_both(directory: str) -> list[str]:
    domain = Domain()
    ranks = FileCheckpointManager(directory, domain=domain, run_id="run", settings=CheckpointSettings(), step_mode=True)
    found = [str(ranks.on_main(lambda: f"of {domain.rank}")), str(ranks.on_all(lambda: f"of {domain.rank}"))]
    for action in (
        lambda: ranks.on_main(lambda: _raise(CheckpointDamaged("latest is cut"))),
        lambda: ranks.on_all(lambda: _raise(OSError(5, "Input/output error", "best.pth")) if domain.rank else "mine"),
        lambda: ranks.on_all(lambda: _raise(_Unpicklable()) if domain.rank else "mine"),
        lambda: ranks.on_all(lambda: _raise(ValueError("of rank 1")) if domain.rank else "mine"),
    ):
        with pytest.raises((CheckpointError, ValueError)) as raised:
            action()
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_values_come_back_and_errors_of_one_rank_are_raised_on_both(tmp_path: Path) -> None:
    first, second = run_processes(_met_by_both, str(tmp_path), world_size=2, init_process_group=True)
    assert (first[:2], second[:2]) == (["of 0", "of 0"], ["of 0", "of 1"])
    assert first[2:] == second[2:]
    damaged, disk, odd, value = first[2:]
    assert damaged == "CheckpointDamaged: latest is cut"
    assert disk.startswith("CheckpointDiskError: ") and "best.pth" in disk and GOOD in disk
    assert odd.startswith("CheckpointError: ") and "_Unpicklable: odd" in odd and GOOD in odd
    assert value == "ValueError: of rank 1"
