"""The client of an object store, on servers that run here, on a directory and in memory."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.cloud_servers import cloud_server
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer

from danling.remote.store import (
    RemoteConflict,
    RemoteDenied,
    RemoteError,
    RemoteExists,
    RemoteMissing,
    RemoteSettings,
    RemoteStore,
    RemoteUnavailable,
    open_store,
)

QUICK = RemoteSettings(part_size=5 << 20, timeout_seconds=20.0, retries=2)


def use(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> str:
    """Let clients find a server, and return the URL of a prefix in a new bucket."""
    for name, value in server.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.make_bucket()}/pre/fix"


@pytest.fixture(params=["moto", "localbucket", "google", "azure", "file", "memory"])
def store(
    request: pytest.FixtureRequest,
    moto: ObjectServer,
    localbucket: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RemoteStore]:
    if request.param in ("google", "azure"):
        with cloud_server(request.param) as cloud:
            for name, value in cloud.environment().items():
                monkeypatch.setenv(name, value)
            yield open_store(cloud.url, settings=QUICK)
        return
    if request.param in ("moto", "localbucket"):
        server = moto if request.param == "moto" else localbucket
        yield open_store(use(server, monkeypatch), settings=QUICK)
        return
    yield open_store(
        f"file://{tmp_path}/store"
        if request.param == "file"
        else f"memory:///{secrets.token_hex(8)}"
    )


def test_objects_are_put_listed_read_in_ranges_and_removed(
    store: RemoteStore, tmp_path: Path
) -> None:
    large = secrets.token_bytes((6 << 20) + 1)
    (tmp_path / "large").write_bytes(large)
    store.put("a/large", tmp_path / "large")
    store.put("a/deeper/b", b"0123456789")
    store.put("ab", b"beside")
    assert store.get("a/large") == large and b"".join(store.chunks("a/large", 1 << 20)) == large
    listed = {entry.key: entry.size for entry in store.list("a")}
    assert listed == {"a/large": len(large), "a/deeper/b": 10} and store.directories("a") == [
        "deeper"
    ]
    assert store.directories() == ["a"] and store.head("ab").size == 6
    assert [entry.key for entry in store.list("a", after="a/deeper/b")] == ["a/large"]
    for key in ("a/large", "a/never", "a/large"):
        store.delete(key)
    assert {entry.key for entry in store.list()} == {"a/deeper/b", "ab"}
    with pytest.raises(RemoteMissing, match="a/large"):
        store.get("a/large")


def test_an_object_is_created_once(store: RemoteStore) -> None:
    store.put_if_absent("lock", b"mine")
    assert store.put_if_absent("lock", b"mine") == store.get_tagged("lock")[1]
    with pytest.raises(RemoteExists):
        store.put_if_absent("lock", b"of somebody else")
    assert store.get("lock") == b"mine"


@pytest.mark.parametrize("store", ["moto", "google", "azure", "memory"], indirect=True)
def test_an_object_is_replaced_when_it_is_still_the_same(store: RemoteStore) -> None:
    first = store.put_if_absent("lock", b"one")
    second = store.put_if_match("lock", b"two", first)
    assert second != first and store.get_tagged("lock") == (b"two", second)
    with pytest.raises(RemoteConflict):
        store.put_if_match("lock", b"three", first)
    with pytest.raises(RemoteConflict):
        store.put_if_match("nothing", b"three", first)


def test_directory_refuses_conditional_replacement(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    tag = store.put_if_absent("lock", b"one")
    with pytest.raises(RemoteError, match="cannot do that"):
        store.put_if_match("lock", b"two", tag)


def test_a_lost_answer_to_a_conditional_put_counts_as_done(
    moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(use(moto, monkeypatch, proxy.endpoint), settings=QUICK)
    first = proxy.lose_answer(when=lambda request: request.method == "PUT")
    tag = store.put_if_absent("lock", b"one")
    assert first.hit == 1 and tag == store.get_tagged("lock")[1]
    second = proxy.lose_answer(when=lambda request: request.method == "PUT")
    tag = store.put_if_match("lock", b"two", tag)
    assert second.hit == 1 and tag == store.get_tagged("lock")[1]
    assert store.get("lock") == b"two"


def test_errors_name_the_object_and_the_mend_on_one_line(
    moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = use(moto, monkeypatch, proxy.endpoint)
    store = open_store(url, settings=RemoteSettings(retries=0, timeout_seconds=20.0))
    cases: list[tuple[int, str, type[RemoteError], str]] = [
        (403, "AccessDenied", RemoteDenied, "AccessDenied.*remote_credentials"),
        (400, "ExpiredToken", RemoteDenied, "ExpiredToken.*remote_credentials"),
        (403, "RequestTimeTooSkewed", RemoteDenied, "RequestTimeTooSkewed.*clock"),
        (507, "InsufficientStorage", RemoteUnavailable, "InsufficientStorage.*room"),
        (503, "SlowDown", RemoteUnavailable, "503"),
    ]
    for status, code, kind, text in cases:
        proxy.answer(status, code)
        with pytest.raises(kind, match=text) as caught:
            store.put("a/b", b"content")
        assert (
            type(caught.value) is kind
            and "\n" not in str(caught.value)
            and f"{url}/a/b" in str(caught.value)
        )
        proxy.heal()
    with pytest.raises(RemoteMissing, match="Make the bucket"):
        open_store("s3://no-such-bucket-here").put("a", b"content")
    with pytest.raises(RemoteMissing, match="Make the bucket"):
        list(open_store("s3://no-such-bucket-here").list())


@pytest.mark.parametrize("bad", [("lin/one/../other", "lin/two/files/./other"), ("../lin/x",)])
def test_key_with_dots_is_named_once_and_the_other_objects_are_listed(
    bad: tuple[str, ...],
    moto: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = use(moto, monkeypatch)
    bucket = url.split("/")[2]
    keys = [
        "lin/one/checkpoints/latest.pth",
        "lin/one/files/metrics.jsonl",
        "lin/two/files/logs/a.log",
        "top",
    ]
    for key in keys:
        moto.write(bucket, f"pre/fix/{key}", b"content")
    for key in bad:
        moto.write(bucket, f"pre/fix/{key}", b"content")
    for prefix in ("", "lin", "lin/one"):
        store = open_store(url, settings=QUICK)
        with caplog.at_level("WARNING", "danling"):
            found = [entry.key for entry in store.list(prefix)]
        assert sorted(found) == [key for key in keys if key.startswith(prefix)]
        assert [entry.key for entry in store.list(prefix)] == found
        told = [record.getMessage() for record in caplog.records]
        is_met = any(f"/{key}".startswith(f"/{prefix}" if prefix else "") for key in bad)
        assert len(told) == is_met and all(
            "Remove that object" in line and "/." in line for line in told
        )
        caplog.clear()
    assert store.directories("lin") == ["one", "two"] and store.directories("lin/one") == [
        "checkpoints",
        "files",
    ]
    assert store.directories() == ["lin"]
    assert [entry.key for entry in store.list("lin", after="lin/one/files/metrics.jsonl")] == [
        keys[2]
    ]


def test_revoked_credentials_are_renewed_before_they_expire(
    moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = use(moto, monkeypatch, proxy.endpoint)
    names = ["first", "second"]

    def credentials() -> dict[str, object]:
        end = datetime.now(UTC) + timedelta(hours=1)
        return {
            "access_key_id": names[0],
            "secret_access_key": "secret",
            "token": None,
            "expires_at": end,
        }

    store = open_store(url, settings=QUICK, credentials=credentials)
    store.put("a", b"one")
    revoked = proxy.answer(
        403, "InvalidToken", when=lambda request: "Credential=first" in str(request.headers)
    )
    with pytest.raises(RemoteDenied):
        store.get("a")
    del names[0]
    assert store.get("a") == b"one" and revoked.hit == 3


def test_a_url_of_no_store_is_refused(tmp_path: Path) -> None:
    for url in ("hf://models", "file://"):
        with pytest.raises(RemoteError, match="Expected the URL of an object store"):
            open_store(url)
    for url in (f"file://{tmp_path}/a#b", "s3://bucket/a?b"):
        with pytest.raises(RemoteError, match=r"'#' is written as %23"):
            open_store(url)
    open_store(f"file://{tmp_path}/a%23b").put("key", b"content")
    assert (tmp_path / "a#b" / "key").exists()


def test_a_forked_process_is_told_instead_of_hanging(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.put("a", b"content")
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("a")
        except RemoteError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    assert b"forked" in os.read(ours, 1000)
    os.close(ours)


def test_without_the_package_the_mend_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match="pip install obstore"):
        open_store(f"file://{tmp_path}")
