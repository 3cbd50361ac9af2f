"""The servers and the proxy that the other tests of object stores rely on do what they say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.fault_proxy import FaultProxy, fault_proxy
from support.object_servers import ObjectServer

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto")
from obstore.exceptions import (  # noqa: E402
    AlreadyExistsError,
    BaseError,
    PreconditionError,
)
from obstore.store import S3Store  # noqa: E402


@pytest.fixture
def proxy(moto: ObjectServer) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as proxy:
        yield proxy


def opened(server: ObjectServer, bucket: str, endpoint: str | None = None, **options: Any) -> S3Store:
    """Return a client; one that answers at once when it is told to try no more."""
    known = server.environment(endpoint)
    return S3Store(
        bucket,
        endpoint=known["AWS_ENDPOINT_URL"],
        access_key_id=known["AWS_ACCESS_KEY_ID"],
        secret_access_key=known["AWS_SECRET_ACCESS_KEY"],
        region=known["AWS_REGION"],
        client_options={"allow_http": True, **options},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30), "backoff": QUICK},
    )


QUICK: Any = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2}


@pytest.mark.parametrize("number", [0, 1], ids=["moto", "localbucket"])
def test_both_servers_keep_objects_and_know_create(number: int, moto: ObjectServer, localbucket: ObjectServer) -> None:
    server = (moto, localbucket)[number]
    bucket = server.make_bucket()
    store = opened(server, bucket)
    obstore.put(store, "a/b", b"0123456789")
    assert server.objects(bucket) == {"a/b": 10} and server.objects(bucket, "c/") == {}
    assert bytes(obstore.get_range(store, "a/b", start=2, length=3)) == b"234"
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a/b", b"x", mode="create")
    server.flip(bucket, "a/b", 0)
    assert server.read(bucket, "a/b") == b"1123456789"
    server.delete(bucket, "a/b")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/b")


def test_moto_honours_if_match_and_localbucket_ignores_it(moto: ObjectServer, localbucket: ObjectServer) -> None:
    for server, honours in ((moto, True), (localbucket, False)):
        store = opened(server, server.make_bucket())
        first = obstore.put(store, "lock", b"one")
        obstore.put(store, "lock", b"two")
        if honours:
            with pytest.raises(PreconditionError):
                obstore.put(store, "lock", b"three", mode={"e_tag": first["e_tag"]})
        else:
            obstore.put(store, "lock", b"three", mode={"e_tag": first["e_tag"]})


def test_an_unfinished_upload_is_seen_by_the_server_alone(moto: ObjectServer) -> None:
    bucket = moto.make_bucket()
    moto._done("POST", f"/{bucket}/big", {"uploads": ""})
    assert moto.objects(bucket) == {} and moto.unfinished_uploads(bucket) == 1


def test_proxy_fails_as_often_as_it_is_told_and_the_client_comes_through(moto: ObjectServer, proxy: FaultProxy) -> None:
    bucket = moto.make_bucket()
    store = opened(moto, bucket, proxy.endpoint)
    fault = proxy.answer(503, "SlowDown", times=2)
    obstore.put(store, "a", b"content" * 1000)
    assert fault.hit == 2 and [r.status for r in proxy.requests] == [503, 503, 200]
    proxy.cut_upload(100)
    obstore.put(store, "b", b"content" * 1000)
    proxy.lose_answer(when=lambda r: r.method == "PUT")
    obstore.put(store, "c", b"content" * 1000)
    assert moto.objects(bucket) == {"a": 7000, "b": 7000, "c": 7000}
    proxy.forget()
    proxy.cut_download(1000)
    assert bytes(obstore.get(store, "a").bytes()) == b"content" * 1000
    assert proxy.requests[0].sent == 1000 and proxy.downloaded() >= 7000


def test_proxy_denies_as_a_store_does(moto: ObjectServer, proxy: FaultProxy) -> None:
    store = opened(moto, moto.make_bucket(), proxy.endpoint)
    proxy.answer(403, "AccessDenied", when=lambda r: r.is_listing)
    obstore.put(store, "a", b"content")
    with pytest.raises(BaseError, match="403"):
        obstore.list(store).collect()


def test_a_hanging_request_goes_on_when_it_is_released(moto: ObjectServer, proxy: FaultProxy) -> None:
    bucket = moto.make_bucket()
    store = opened(moto, bucket, proxy.endpoint)
    fault = proxy.hold(when=lambda r: r.is_upload)
    upload = threading.Thread(target=lambda: obstore.put(store, "a", b"content"))
    upload.start()
    assert fault.came.wait(30) and moto.objects(bucket) == {}
    fault.release()
    upload.join()
    assert moto.objects(bucket) == {"a": 7}


def test_a_hanging_request_ends_at_the_client_s_own_limit(moto: ObjectServer, proxy: FaultProxy) -> None:
    store = opened(moto, moto.make_bucket(), proxy.endpoint, timeout=timedelta(milliseconds=100))
    proxy.hold(when=lambda r: r.is_upload)
    with pytest.raises(BaseError):
        obstore.put(store, "a", b"content")


def test_proxy_makes_a_server_that_ignores_if_match(moto: ObjectServer, proxy: FaultProxy) -> None:
    store = opened(moto, moto.make_bucket(), proxy.endpoint)
    proxy.change_headers(lambda headers: headers.pop("if-match", None))
    first = obstore.put(store, "lock", b"one")
    obstore.put(store, "lock", b"two")
    obstore.put(store, "lock", b"three", mode={"e_tag": first["e_tag"]})
    assert bytes(obstore.get(store, "lock").bytes()) == b"three"
