"""A port that is kept for a server which starts later."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from danling.utils.process import held_port


def test_nobody_else_gets_the_port_and_a_store_of_torch_may_listen_there() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")
        assert store.get("key") == b"value"
    # The store goes on when the port is held no more.
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "later")
    assert store.get("key") == b"later"
