"""One writer for each run in a store."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer
from support.patience import until

from danling.remote.lease import Lease, Writer, unkept
from danling.remote.store import RemoteConflict, RemoteSettings, RemoteStore, open_store

KEY = "line/run/lock"


@pytest.fixture
def store(
    moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteStore]:
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    yield open_store(
        f"s3://{moto.make_bucket()}", settings=RemoteSettings(retries=0, timeout_seconds=20.0)
    )


def keys(store: RemoteStore) -> list[str]:
    return [entry.key for entry in store.list()]


REFUSED = "Expected to be the one process that writes .*/line/run. Received: another one"


def test_the_second_writer_is_refused_while_the_first_lives(store: RemoteStore) -> None:
    first, second = Lease(store, KEY), Lease(store, KEY)
    first.acquire()
    assert first.is_exclusive and keys(store) == [KEY]
    with pytest.raises(RemoteConflict, match=REFUSED):
        second.acquire()
    first.release()
    assert keys(store) == []
    second.acquire()
    second.release()


def lock(**changes: object) -> bytes:
    """Return what a writer on another machine would have stored, with some fields changed."""
    return json.dumps({**asdict(replace(Writer.me(60.0), machine="elsewhere")), **changes}).encode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff rubbish",
        b"[" * 100_000,
        b"[]",
        b"{}",
        lock(seconds=float("inf")),
        lock(seconds=float("nan")),
        lock(seconds=1e300),
        lock(seconds=-5),
        lock(seconds="x"),
        lock(pid=float("inf")),
        lock(pid=None),
    ],
    ids=range(12),
)
def test_lock_of_no_writer_is_taken_over_at_once(store: RemoteStore, content: bytes) -> None:
    store.put(KEY, content)
    lease = Lease(store, KEY)
    lease.acquire()
    assert lease.is_exclusive
    lease.release()


def test_a_notebook_makes_the_same_run_again(store: RemoteStore) -> None:
    first, second = Lease(store, KEY, seconds=0.4), Lease(store, KEY, again=True)
    first.acquire()
    second.acquire()
    until(lambda: first.lost is not None)
    first.release()
    assert keys(store) == [KEY]
    second.release()


def test_writer_killed_on_this_machine_is_followed_at_once(store: RemoteStore) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    writer = Writer.me(3600.0)
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    store.put(KEY, replace(writer, pid=child.pid, born=stat[19]).text())
    store.put(f"{KEY}.probe-of-it", replace(writer, pid=child.pid, born=stat[19]).text())
    child.kill()
    child.wait()
    lease = Lease(store, KEY)
    lease.acquire()
    assert keys(store) == [KEY], "what it tried the store with is removed too"
    lease.release()


def test_silent_writer_elsewhere_is_followed_after_its_lease(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(KEY, replace(Writer.me(2.0), machine="another", host="far-away").text())
    lease = Lease(store, KEY, seconds=1.0)
    with caplog.at_level(logging.INFO, "danling"):
        lease.acquire()
    assert "far-away, which may be gone: waiting until its lease ends" in caplog.text
    lease.release()


def test_replaced_writer_learns_of_it(store: RemoteStore) -> None:
    # Long enough that a busy machine is not taken for a store that is silent.
    lease = Lease(store, KEY, seconds=4.0)
    lease.acquire()
    assert lease.lost is None
    store.put(KEY, Writer.me(60.0).text())
    assert lease._thread is not None
    lease._thread.join(30)
    assert isinstance(lease.lost, RemoteConflict) and "taken over" in str(lease.lost)
    lease.release()
    assert keys(store) == [KEY], "the lock of the other one stays"


@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_store_without_conditional_writes_is_detected(
    store: RemoteStore, proxy: FaultProxy, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert unkept(store, f"{KEY}-probe") is None
    proxy.change_headers(lambda headers: headers.pop(header, None))
    lease = Lease(store, KEY)
    with caplog.at_level(logging.WARNING, "danling"):
        lease.acquire()
    assert not lease.is_exclusive
    named = [
        name
        for name in ("If-Match", "If-None-Match")
        if f"ignores the condition {name}. " in caplog.text
    ]
    assert [name.lower() for name in named] == [header]
    lease.release()
    assert keys(store) == []


def compare_tags_bare(headers: dict[str, str]) -> None:
    """Make a server one that compares entity tags without their quotes."""
    tag = headers.get("if-match")
    if tag is not None:
        headers["if-match"] = '"with quotes"' if tag.startswith('"') else f'"{tag}"'


def test_store_comparing_tags_without_quotes_keeps_writers_apart(
    store: RemoteStore, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.change_headers(compare_tags_bare)
    # Renewed every second; long enough that a busy machine is not taken for a store that is silent.
    lease = Lease(store, KEY, seconds=4.0)
    with caplog.at_level(logging.WARNING, "danling"):
        lease.acquire()
    assert lease.is_exclusive and caplog.text == ""
    taken = store.get_tagged(KEY)[1]
    until(lambda: store.get_tagged(KEY)[1] != taken)
    assert lease.lost is None
    store.put(KEY, Writer.me(60.0).text())
    until(lambda: "taken over" in str(lease.lost))
    lease.release()


def test_writer_with_a_failed_renewal_writes_nothing_until_it_succeeds(
    store: RemoteStore, proxy: FaultProxy
) -> None:
    lease = Lease(store, KEY, seconds=0.4)
    lease.acquire()
    proxy.answer(503, "SlowDown")
    until(lambda: lease.lost is not None)
    assert "to be renewed" in str(lease.lost)
    proxy.heal()
    until(lambda: lease.lost is None)
    lease.release()


def test_renewal_before_the_store_fell_silent_is_no_other_writer(
    store: RemoteStore, proxy: FaultProxy
) -> None:
    lease = Lease(store, KEY, seconds=2.0)
    lease.acquire()
    proxy.answer(503, "SlowDown", when=lambda request: request.method == "GET")
    lost = proxy.lose_answer(when=lambda request: request.method == "PUT", times=1)
    assert lost.came.wait(30)
    until(lambda: any(request.method == "GET" for request in proxy.requests[-1:]))
    proxy.heal()
    made = store.get(KEY)
    until(lambda: store.get(KEY) != made)
    assert lease.lost is None
    with pytest.raises(RemoteConflict, match=REFUSED):
        Lease(store, KEY).acquire()
    lease.release()
    assert keys(store) == []


def test_silent_store_is_not_waited_for_at_the_end(store: RemoteStore, proxy: FaultProxy) -> None:
    lease = Lease(store, KEY, seconds=0.4)
    lease.acquire()
    proxy.hold()
    until(lambda: lease.lost is not None)
    begun = time.monotonic()
    lease.release()
    assert time.monotonic() - begun < 10, "a request lasts 20 seconds"
