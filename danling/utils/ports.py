"""A port of this machine for processes that are about to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port of 127.0.0.1 that nobody else is given inside: until a process listens there seconds may pass.

    A server that sets `SO_REUSEADDR`, as each of torch does, may listen there meanwhile.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        # Only now, after it was found to be nobody's.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(held.getsockname()[1])
