"""Ranks of several workers of pytest-xdist share eight places."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forked import fork, kill, wait
from support.job import Job
from support.locks import wait_for
from support.places import PLACES, Places, _free, places, share_places
from support.processes import run_processes
from support.warm import interpreter


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory of places of this test's own."""
    before = share_places(tmp_path / "places")
    yield tmp_path / "places"
    share_places(before)


@pytest.fixture
def beside(shared: Path) -> Iterator[Callable[[int], int]]:
    """Start a process that holds so many places, until it is killed; return its id once it has them."""
    started: list[int] = []

    def start(number: int) -> int:
        there = shared / f"holds-{len(started)}"
        started.append(fork(_hold, number, there))
        wait_for(there.exists)
        return started[-1]

    yield start
    for pid in started:
        try:
            kill(pid)
        except (ProcessLookupError, ChildProcessError):
            continue


def _hold(number: int, there: Path) -> None:
    with places(number):
        there.touch()
        time.sleep(60)


def free_places(shared: Path) -> int:
    locks = _free(shared, PLACES)
    for lock in locks:
        os.close(lock)
    return len(locks)


def _work(number: int, times: int, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(times):
        with places(number):
            os.write(file, b"%+d\n" % number)
            time.sleep(0.001)
            os.write(file, b"%+d\n" % -number)


def test_no_more_are_held_than_there_are_and_everybody_gets_some(shared: Path, tmp_path: Path) -> None:
    wanted = (1, 3, 4, PLACES, 5)
    workers = [fork(_work, number, 20, str(tmp_path / "log")) for number in wanted]
    assert [wait(worker) for worker in workers] == [0] * len(wanted)
    steps = [int(line) for line in (tmp_path / "log").read_text().splitlines()]
    held = [sum(steps[:number]) for number in range(1, len(steps) + 1)]
    assert max(held) == PLACES and min(held) == 0 and len(steps) == 2 * 20 * len(wanted)


def test_who_wants_more_than_there_are_gets_all(shared: Path) -> None:
    with places(PLACES + 3):
        assert free_places(shared) == 0
    assert free_places(shared) == PLACES


def test_places_of_a_killed_process_are_free(shared: Path, beside: Callable[[int], int]) -> None:
    holder = beside(PLACES)
    assert free_places(shared) == 0
    kill(holder)
    with places(PLACES):
        assert free_places(shared) == 0


def test_what_was_forked_meanwhile_keeps_no_place(shared: Path) -> None:
    with places(2):
        child = fork(time.sleep, 60)
    assert free_places(shared) == PLACES
    kill(child)


def test_a_test_that_has_some_does_not_wait_for_more(shared: Path, beside: Callable[[int], int]) -> None:
    beside(PLACES - 2)
    first, second = Places(1), Places(4)
    assert free_places(shared) == 0
    second.give_back()
    assert free_places(shared) == 1
    second.give_back()
    first.give_back()
    assert free_places(shared) == 2


def test_a_second_thread_waits_for_the_first_one_only(shared: Path, beside: Callable[[int], int]) -> None:
    holder = beside(PLACES)
    taken: list[Places] = []
    threads = [threading.Thread(target=lambda: taken.append(Places(PLACES))) for _ in range(2)]
    for thread in threads:
        thread.start()
    kill(holder)
    for thread in threads:
        thread.join()
    assert len(taken) == 2
    for each in taken:
        each.give_back()
    assert free_places(shared) == PLACES


def _hold_until_somebody_waits(shared: str, there: Path, seconds: float) -> None:
    with places(PLACES):
        there.touch()
        with open(f"{shared}/gate") as gate:
            while not _is_locked(gate.fileno()):
                time.sleep(0.002)
        time.sleep(seconds)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def test_the_clock_of_a_test_stands_still_while_it_waits(shared: Path, tmp_path: Path) -> None:
    holder = fork(_hold_until_somebody_waits, str(shared), tmp_path / "there", 0.5)
    wait_for((tmp_path / "there").exists)
    begin, left = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    assert left, "pytest-timeout has set no timer"
    with places(1):
        counted = left - signal.getitimer(signal.ITIMER_REAL)[0]
        assert counted <= time.monotonic() - begin - 0.45
    assert wait(holder) == 0


def _places_left(shared: str) -> int | None:
    return free_places(Path(shared)) if os.environ["RANK"] == "0" else None


def _raise() -> None:
    raise KeyError("of a rank")


def test_ranks_take_places_while_they_run(shared: Path) -> None:
    assert run_processes(_places_left, str(shared), world_size=3) == [PLACES - 3, None, None]
    with pytest.raises(KeyError):
        run_processes(_raise, world_size=2)
    assert free_places(shared) == PLACES


def test_a_job_takes_places_until_it_has_ended(shared: Path) -> None:
    with Job([interpreter(), "-c", "pass"], ranks=2) as job:
        assert free_places(shared) == PLACES - 2
        assert job.wait().exit_code == 0
        assert free_places(shared) == PLACES
    with pytest.raises(FileNotFoundError):
        Job(["/no/such/program"])
    with Job([interpreter(), "-c", "import time; time.sleep(60)"]):
        assert free_places(shared) == PLACES - 1
    assert free_places(shared) == PLACES
