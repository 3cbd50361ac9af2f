"""The heartbeat of living, hanging, stopped and killed processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import until
from support.warm import interpreter

from danling.runners.state import TrainState
from danling.supervision import Heartbeat


def begun(directory: Path, interval_seconds: float, rank: int = 0) -> Heartbeat:
    runner: Any = SimpleNamespace(rank=rank, state=SimpleNamespace(train=TrainState()))
    return Heartbeat(runner, directory, interval_seconds)


def read(heartbeat: Heartbeat) -> dict[str, Any]:
    return dict(json.loads(heartbeat.file.read_text()))


def test_heartbeat_names_rank_and_host(tmp_path: Path) -> None:
    heartbeat = begun(tmp_path / "heartbeats", 0.02, 3)
    first = read(heartbeat)
    assert heartbeat.file.name == "rank-3.json"
    assert (first["rank"], first["pid"], first["status"]) == (3, os.getpid(), "running")
    assert (first["global_step"], first["last_step_time"]) == (0, None)
    train = heartbeat._runner.state.train
    train.global_step, train.epoch = 17, 2
    heartbeat.beat()
    until(lambda: read(heartbeat)["global_step"] == 17)
    assert read(heartbeat)["epoch"] == 2
    assert abs(read(heartbeat)["last_step_time"] - time.time()) < 5
    heartbeat.stop()
    heartbeat.stop()
    assert read(heartbeat)["status"] == "stopped"
    assert [path.name for path in heartbeat.file.parent.iterdir()] == ["rank-3.json"]


def test_hanging_main_thread_is_reported_and_own_thread_ends_at_once(tmp_path: Path) -> None:
    heartbeat = begun(tmp_path, 0.02)
    heartbeat.beat()
    until(lambda: read(heartbeat)["seconds_without_step"] >= 0.2)
    heartbeat.stop()
    heartbeat = begun(tmp_path, 3600)
    heartbeat.stop(timeout=60)
    assert not [thread for thread in threading.enumerate() if thread.name == "danling-heartbeat"]


def test_every_reader_sees_a_whole_file_also_after_sigkill(tmp_path: Path) -> None:
    script = (
        "import sys, time; from types import SimpleNamespace as Space\n"
        "from danling.runners.state import TrainState\n"
        "from danling.supervision.heartbeat import Heartbeat\n"
        "train = TrainState()\n"
        "heartbeat = Heartbeat(Space(rank=0, state=Space(train=train)), sys.argv[1], 0.0005)\n"
        "print('ready', flush=True)\n"
        "while True: train.global_step += 1; heartbeat.beat(); time.sleep(0.001)\n"
    )
    command = [interpreter(), "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(200):
            json.loads((tmp_path / "rank-0.json").read_text())
        process.send_signal(signal.SIGKILL)
    assert json.loads((tmp_path / "rank-0.json").read_text())["status"] == "running"


def test_unwritable_file_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat = begun(tmp_path, 0.01)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("danling.supervision.heartbeat.write_atomically", full_disk)
    with caplog.at_level(logging.WARNING, logger="danling"):
        until(lambda: caplog.messages)
        time.sleep(0.05)
        heartbeat.stop()
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.text
