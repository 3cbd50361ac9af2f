"""What the listener of a rank answers while its main thread does something else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from danling.elastic.member import Member
from danling.elastic.protocol import RankSide
from danling.elastic.wire import Channel


@pytest.fixture
def member_and_coordinator() -> Iterator[tuple[Member, Channel]]:
    """A member without a process group, and the other end of its channel."""
    ours, theirs = socket.socketpair()
    member = Member.__new__(Member)
    member._side, member._channel = RankSide(handle="h"), Channel(ours)
    member._lock, member._changed = threading.Lock(), threading.Event()
    coordinator = Channel(theirs)
    yield member, coordinator
    member._channel.close()
    coordinator.close()


def _form(generation: int) -> dict[str, Any]:
    return {"kind": "form", "generation": generation, "handles": ["h"]}


def test_rank_that_sends_its_state_for_long_answers_that_it_is_busy(
    member_and_coordinator: tuple[Member, Channel],
) -> None:
    member, coordinator = member_and_coordinator
    # The second one is repeated while the main thread connects, and sends a large state to the ranks that are behind.
    member._hear(_form(1))
    member._hear(_form(1))
    assert [message["kind"] for message in coordinator.receive()] == ["busy", "busy"]
    assert member._side.mode == "forming"
    member._side.settle()
    member._hear(_form(1))
    member._hear({"kind": "lost", "generation": 1})
    assert coordinator.receive() == [
        {"kind": "formed", "generation": 1},
        {"kind": "busy", "generation": 1},
    ]
