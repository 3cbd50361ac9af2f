"""A wire between ranks and the coordinator that loses messages, delays them, and delivers them twice."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

_REPEATED = frozenset({"lost", "form", "regroup", "complete", "ready", "formed", "busy"})
"""Messages that are said again until they are answered. The others are sent once, over a connection that loses nothing."""


class Wire:
    """Carries lines between connections of ranks and the coordinator.

    Args:
        seed: Of the choices.
        lost: Part of the messages that are lost; as many come late, and as many twice.
        latest: Seconds by which one may be late.
    """

    def __init__(self, seed: str, *, lost: float, latest: float = 0.2) -> None:
        self._choices, self._lost, self._latest = random.Random(seed), lost, latest
        self._ends: dict[socket.socket, socket.socket] = {}
        self._read: dict[socket.socket, bytes] = {}
        self._late: list[tuple[float, int, socket.socket, bytes]] = []
        self._counter = itertools.count()
        self._has_closed = False

    def open(self, port: int) -> int:
        """Carry messages to this port, and return the one to which ranks connect."""
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        found: int = self._listener.getsockname()[1]
        return found

    def close(self) -> None:
        """Close everything."""
        self._has_closed = True
        self._thread.join()
        for each in [*self._ends, self._listener]:
            each.close()

    def _serve(self) -> None:
        while not self._has_closed:
            for key, _ in self._selector.select(0.005):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._carry(key.fileobj)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to, line = heapq.heappop(self._late)
                self._send(to, line)

    def _accept(self) -> None:
        rank, _ = self._listener.accept()
        try:
            coordinator = socket.create_connection(("127.0.0.1", self._port))
        except ConnectionError:
            rank.close()  # the agent has been ended
            return
        self._ends[rank], self._ends[coordinator] = coordinator, rank
        for each in (rank, coordinator):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._read[each] = b""
            self._selector.register(each, selectors.EVENT_READ)

    def _carry(self, end: Any) -> None:
        if end not in self._ends:
            return  # its other end has just been closed
        chunk = b""
        with suppress(OSError):
            chunk = end.recv(1 << 16)
        if not chunk:
            for each in (end, self._ends[end]):
                self._selector.unregister(each)
                each.close()
            del self._ends[self._ends.pop(end)]
            return
        *lines, self._read[end] = (self._read[end] + chunk).split(b"\n")
        for line in lines:
            self._deliver(self._ends[end], line + b"\n")

    def _deliver(self, to: socket.socket, line: bytes) -> None:
        chance = self._choices.random() if json.loads(line)["kind"] in _REPEATED else 1.0
        if chance < self._lost:
            return
        if chance < 3 * self._lost:
            late = time.monotonic() + self._choices.uniform(0, self._latest)
            heapq.heappush(self._late, (late, next(self._counter), to, line))
        if chance >= 2 * self._lost:
            self._send(to, line)

    def _send(self, to: socket.socket, line: bytes) -> None:
        # A process that is stopped reads nothing; what it does not read is lost, as where a machine is away.
        if to in self._ends:
            with suppress(OSError):
                to.settimeout(0.01)
                to.sendall(line)
