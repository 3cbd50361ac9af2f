"""What the tests of object stores share: a proxy in front of the server of `tests/conftest.py`, and a bucket behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fault_proxy import FaultProxy, fault_proxy
from support.object_servers import ObjectServer

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture
def proxy(moto: ObjectServer) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url(moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a prefix in a new bucket, which clients find through the proxy."""
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{moto.make_bucket()}/runs"
