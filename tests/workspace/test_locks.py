"""One writer in a directory: a lock that a kill gives back at once, and that children do not keep."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from support.patience import until
from support.processes import child, hold

from danling.utils import locks
from danling.utils.locks import FileLock


def is_refused_to_others(file: Path) -> bool:
    """Whether another process cannot take the lock."""
    marker = file.with_name("refused")

    def other() -> None:
        if not FileLock(file).acquire():
            marker.touch()

    with child(other) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return marker.exists()


def test_second_process_learns_the_holder_and_a_kill_frees_the_lock_at_once(tmp_path: Path) -> None:
    file, marker = tmp_path / "run" / ".lock", tmp_path / "held"
    mine = FileLock(file)
    with child(lambda: hold(file, marker)) as pid:
        until(marker.exists)
        assert not mine.acquire()
        assert (mine.holder.pid, mine.holder.host) == (pid, socket.gethostname())
        assert mine.holder.since.endswith(" UTC")
        assert str(pid) in str(mine.holder)
    assert mine.acquire()
    assert mine.held
    assert json.loads(file.read_text())["pid"] == os.getpid()
    mine.release()
    mine.release()
    assert not mine.held


def test_fork_of_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    file, marker = tmp_path / ".lock", tmp_path / "worker"

    def with_a_worker() -> None:
        lock = FileLock(file)
        assert lock.acquire()
        worker = os.fork()
        if worker == 0:
            marker.write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        time.sleep(60)

    with child(with_a_worker):
        until(lambda: marker.exists() and marker.read_text() != "")
        assert not FileLock(file).acquire()
    worker = int(marker.read_text())
    os.kill(worker, 0)  # it lives
    mine = FileLock(file)
    assert mine.acquire()
    os.kill(worker, signal.SIGKILL)


def test_child_releasing_an_inherited_lock_releases_nothing(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    mine = FileLock(file)
    assert mine.acquire()
    with child(mine.release) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_refused_to_others(file)


def test_a_second_lock_of_one_process_is_refused_and_does_not_drop_the_first(
    tmp_path: Path,
) -> None:
    file = tmp_path / ".lock"
    mine = FileLock(file)
    assert mine.acquire()
    assert not FileLock(tmp_path / "." / ".lock").acquire()
    assert not FileLock(file).wait(60)  # at once: waiting for oneself is of no use
    assert is_refused_to_others(file)


def test_start_waits_for_a_dying_one_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, marker, told, lines = tmp_path / "run" / ".lock", tmp_path / "held", tmp_path / "told", []

    def dying() -> None:
        lock = FileLock(file)
        assert lock.acquire()
        marker.touch()
        until(told.exists)
        lock.release()
        time.sleep(60)

    def warn(text: str, *values: object) -> None:
        lines.append(text % values)
        told.touch()

    monkeypatch.setattr(locks.logger, "warning", warn)
    with child(dying) as pid:
        until(marker.exists)
        mine = FileLock(file)
        assert mine.wait(30)
        assert [str(pid) in line and "waiting up to 30 seconds" in line for line in lines] == [True]
        mine.release()
    assert not file.exists()


def test_directory_removed_by_another_start_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "run" / ".lock"

    def given_up() -> None:
        lock = FileLock(file)
        while True:
            with contextlib.suppress(OSError):
                if lock.acquire():
                    lock.release()
                    file.parent.rmdir()

    mine = FileLock(file)
    taken, failed = 0, []
    with child(given_up):
        while taken < 5000 and not failed:
            try:
                is_mine = mine.acquire()
            except OSError as error:
                failed.append(error)
                continue
            if is_mine:
                taken += 1
                mine.release()
                with contextlib.suppress(OSError):
                    file.parent.rmdir()
    assert not failed, f"after {taken} times: {failed}"


def test_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", without_locks)
    monkeypatch.setattr(locks, "_warned_of", set())
    first, second = FileLock(tmp_path / "a" / ".lock"), FileLock(tmp_path / "b" / ".lock")
    assert first.acquire()
    assert second.acquire()
    assert not first.works
    assert len([line for line in caplog.messages if "has no locks" in line]) == 1


def test_link_in_place_of_a_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "thesis.tex"
    victim.write_text("three years of work")
    (tmp_path / ".lock").symlink_to(victim)
    lock = FileLock(tmp_path / ".lock")
    with pytest.raises(ValueError, match=r"Expected no link at .*\.lock"):
        lock.acquire()
    assert not lock.is_taken() and victim.read_text() == "three years of work"
