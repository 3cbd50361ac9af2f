"""A server for the tests of object stores, one for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fault_proxy import FaultProxy, fault_proxy
from support.object_servers import ObjectServer, moto_server

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def moto() -> Iterator[ObjectServer]:
    with moto_server() as server:
        yield server


@pytest.fixture
def proxy(moto: ObjectServer) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as proxy:
        yield proxy
