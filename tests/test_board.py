"""Notes of ranks in a store, over connections of their own; and in files where the store is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from danling.distributed import Board


def test_notes_pass_while_another_thread_waits_in_the_store() -> None:
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20)))
    mine, yours, other = Board(lambda: store, "1"), Board(lambda: store, "1"), Board(lambda: store, "2")
    waiting = threading.Thread(target=store.get, args=("never before the end",))
    waiting.start()
    time.sleep(0.05)
    assert yours.read("a/1") is None
    mine.write("a/1", "ü")
    assert yours.read("a/1") == "ü" and other.read("a/1") is None
    mine.write("a/1", "")
    assert yours.read("a/1") == ""
    assert waiting.is_alive()
    TCPStore("127.0.0.1", store.underlying_store.port, 1, is_master=False).set("job/never before the end", "now")
    waiting.join()


def test_files_take_the_place_of_a_store_that_is_gone(tmp_path: Path) -> None:
    def gone() -> TCPStore:
        raise RuntimeError("Broken pipe")

    left = tmp_path / "notes" / "alarm"
    left.parent.mkdir()
    left.write_text("limit")
    os.utime(left, (1, 1))
    mine, yours = (Board(gone, "1", directory=lambda: tmp_path) for _ in range(2))
    # What an earlier job has left is no note of this one.
    assert yours.read("alarm") is None
    mine.write("standing/0", "here")
    assert yours.read("standing/0") == "here" and yours.read("standing/1") is None
    # The time of a file is that of the last tick, which may have been before the board was made.
    third = Board(gone, "1", directory=lambda: tmp_path)
    tick = time.time() - 0.02
    os.utime(left.with_name("standing-0"), (tick, tick))
    assert third.read("standing/0") == "here"
    nowhere = Board(gone, "1")
    nowhere.write("a", "b")
    assert nowhere.read("a") is None
    blocked = Board(gone, "1", directory=lambda: left)
    blocked.write("a", "b")
    assert blocked.read("a") is None


def _keep(ready: Any) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ready.send(store.port)
    signal.pause()


def test_files_take_the_place_of_a_store_whose_process_is_stopped(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    keeper = context.Process(target=_keep, args=(theirs,), daemon=True)
    keeper.start()
    store = TCPStore("127.0.0.1", ours.recv(), None, False, wait_for_workers=False)
    mine, yours = (Board(lambda: store, "1", directory=lambda: tmp_path) for _ in range(2))
    mine.write("a", "x")
    assert yours.read("a") == "x"
    try:
        os.kill(keeper.pid or 0, signal.SIGSTOP)
        # The signal is on its way: until it has arrived, the store still answers.
        os.waitpid(keeper.pid or 0, os.WUNTRACED)
        assert mine.read("a") is None and yours.read("a") is None
        mine.write("a", "y")
        assert yours.read("a") == "y"
    finally:
        keeper.kill()
        keeper.join()
