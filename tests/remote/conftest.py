"""What the tests of object stores share: a proxy in front of the server of `tests/conftest.py`."""

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
