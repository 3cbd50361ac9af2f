"""Signals sent by real processes to real processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time

import pytest
from support.warm import interpreter

from danling.supervision import SignalWatcher

LOOP = """
import sys, time
from danling.supervision.signals import EXIT_CODES, SignalWatcher
with SignalWatcher() as watcher:
    print("ready", flush=True)
    heed = sys.argv[1] == "heed"
    for _ in range(2000):
        time.sleep(0.005)
        if watcher.received is not None:
            print(watcher.received.name, flush=True)
            if heed:
                sys.exit(EXIT_CODES[watcher.request])
            time.sleep(10)
"""


def start(mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(  # type: ignore[call-overload]
        [interpreter(), "-c", LOOP, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)],
    ids=str,
)
def test_a_signal_is_noted_and_heeded_by_the_loop(number: signal.Signals, code: int) -> None:
    process = start("heed")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == (f"{number.name}\n", "", code)


def test_a_second_sigint_ends_at_once() -> None:
    process = start("ignore")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_two_sigints_after_another_signal_end_at_once(first: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), SignalWatcher() as watcher:
        raised(watcher, first)
        signal.raise_signal(signal.SIGINT)
        assert watcher.received is (signal.SIGTERM if first is signal.SIGTERM else signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


FORKING = """
import os, signal, sys, time
from danling.supervision.signals import SignalWatcher
with SignalWatcher() as watcher:
    children = [os.fork() for _ in range(2)]
    if 0 in children:
        time.sleep(1.5)
        os._exit(0)
    for child in children:
        os.kill(child, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(2.0)
    sys.exit(7 if watcher.received is signal.SIGINT else 8)
"""


def test_signal_to_forked_workers_is_no_second_sigint() -> None:
    assert subprocess.run([interpreter(), "-c", FORKING], timeout=60, check=False).returncode == 7


def raised(watcher: SignalWatcher, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 5
    while watcher.received is None and time.monotonic() < deadline:
        time.sleep(0.001)


def test_signal_ignored_by_the_caller_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalWatcher() as watcher:
            signal.raise_signal(signal.SIGINT)
            assert watcher.received is None
            raised(watcher, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_put_back() -> None:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    watcher = SignalWatcher()
    assert watcher.install()
    assert watcher.install()
    raised(watcher, signal.SIGUSR1)
    watcher.uninstall()
    watcher.uninstall()
    assert {number: signal.getsignal(number) for number in before} == before
    assert watcher.request == "user_signal"


def test_the_most_urgent_signal_stands() -> None:
    with SignalWatcher() as watcher:
        raised(watcher, signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert watcher.received is signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert watcher.received is signal.SIGTERM


def test_another_thread_watches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    answers: list[bool] = []
    watcher = SignalWatcher()
    with caplog.at_level(logging.WARNING, logger="danling"):
        thread = threading.Thread(target=lambda: answers.append(watcher.install()))
        thread.start()
        thread.join()
    assert answers == [False]
    assert "main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
