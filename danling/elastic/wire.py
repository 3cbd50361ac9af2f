"""Messages between ranks, agents and the coordinator: JSON objects, one a line, over a socket. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from danling.utils.plain import parse_json

ADDRESS, TOKEN, JOINS = "DANLING_ELASTIC_ADDRESS", "DANLING_ELASTIC_TOKEN", "DANLING_ELASTIC_JOINS"
"""Variables by which a process finds its coordinator, proves that it belongs to the job, and knows that it joins late."""
MACHINE = "DANLING_ELASTIC_MACHINE"
"""Variable with the name of a machine where there are several; two agents on one host are two machines."""
LONGEST_LINE = 4 << 20
LONGEST_HELLO = 4 << 10
"""Bytes of a line of a process that has not said the token yet."""
_CHUNK = 1 << 16


def machine_name() -> str:
    """Return the name of this machine among those of the run."""
    return os.environ.get(MACHINE) or socket.gethostname()


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """One end of a connection. Neither sending nor receiving ever waits: a process that is stopped reads nothing.

    What cannot be sent is kept and sent later; messages are repeated anyway, so that a backlog beyond one message is dropped.

    Attributes:
        longest_line: The other end is taken for gone if it sends a longer one.
    """

    def __init__(self, connection: socket.socket, *, longest_line: int = LONGEST_LINE) -> None:
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # Messages are short, and ranks wait for them.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.longest_line = connection, longest_line
        self._received = bytearray()
        self._unsent = b""
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it where the other end does not read."""
        self.send_line(line_of(message))

    def send_line(self, line: bytes) -> None:
        """Send a message of which `line_of` has made a line, maybe for many."""
        with self._lock:
            if len(self._unsent) < _CHUNK:
                self._unsent += line
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent = b""  # the end of the connection is noticed where it is read

    def receive(self) -> list[dict[str, Any]]:
        """Return the whole messages that have come.

        Raises:
            Closed: If the other end is gone.
        """
        try:
            ended = False
            # What is left is read the next time: a process that was stopped has many messages to read.
            while len(self._received) <= self.longest_line and not ended:
                chunk = self.socket.recv(_CHUNK)
                self._received += chunk
                ended = not chunk
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > self.longest_line:
            raise Closed
        messages = []
        for line in lines:
            message = parse_json(line.decode(errors="replace"))
            if isinstance(message, dict):
                messages.append(message)
        if ended and not messages:
            raise Closed
        return messages

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return what is sent of a message."""
    return json.dumps(message).encode() + b"\n"


def connect(
    address: str, hello: Mapping[str, Any], *, seconds: float
) -> tuple[Channel, dict[str, Any]]:
    """Connect to the coordinator, introduce this process, and return the channel and the answer.

    Args:
        address: `host:port`.
        hello: What this process is; the token of the job is added.
        seconds: How long to try.

    Raises:
        ConnectionError: If it does not answer.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            channel = Channel(socket.create_connection((host, int(port)), timeout=seconds))
            channel.send({"kind": "hello", "token": os.environ.get(TOKEN, ""), **hello})
            with selectors.DefaultSelector() as selector:
                selector.register(channel.socket, selectors.EVENT_READ)
                while time.monotonic() < end:
                    selector.select(0.5)
                    messages = channel.receive()
                    if messages:
                        return channel, messages[0]
            channel.close()
        except (OSError, Closed):
            pass
        if time.monotonic() >= end:
            raise ConnectionError(
                f"The coordinator of the elastic ranks does not answer at {address}."
            )
        time.sleep(0.1)
