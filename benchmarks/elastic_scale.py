"""What the coordinator of elastic ranks does when one of many ranks dies: `python benchmarks/elastic_scale.py`.

The coordinator is the library's own, over real sockets; the ranks are one loop in the same process that answers as ranks do, and form no
process group. So the seconds are those of both ends on one processor. It prints for each number of ranks what is sent, and how long it
takes from a death until all others have the new membership.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import time
from collections import Counter
from typing import Any

from danling.elastic.coordinator import Coordinator
from danling.elastic.wire import TOKEN

HANDLE = "gloo:{rank}:{uuid}:{rank}:127.0.0.1:29500/default_pg/0//cpu//0"
"""As long as those of torch."""


class Ranks:
    """All ranks, as the coordinator sees them."""

    def __init__(self, coordinator: Coordinator, count: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.sent, self.received = Counter[str](), Counter[str]()
        self.generation: dict[int, int] = {}
        self.sockets = []
        self._rests: dict[int, bytes] = {}
        for rank in range(count):
            connection = socket.create_connection(("127.0.0.1", coordinator.port))
            self.sockets.append(connection)
            self.selector.register(connection, selectors.EVENT_READ, rank)
            hello = {
                "kind": "hello",
                "token": coordinator.token,
                "member": rank,
                "pid": rank + 1,
                "host": "here",
            }
            self.say(rank, hello)
            self.say(rank, self.ready(rank, 0))
            self.generation[rank] = 0

    def ready(self, rank: int, generation: int) -> dict[str, Any]:
        """Return what a rank says that waits for a generation."""
        handle = HANDLE.format(rank=rank, uuid=generation)
        return {
            "kind": "ready",
            "generation": generation,
            "handle": handle,
            "progress": 7,
            "digest": "1f" * 8,
        }

    def say(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message of a rank."""
        line = json.dumps(message).encode() + b"\n"
        self.sockets[rank].sendall(line)
        self.sent["messages"] += 1
        self.sent["bytes"] += len(line)

    def until_formed(self, generation: int) -> None:
        """Answer until each rank has formed a generation."""
        while any(each < generation for each in self.generation.values()):
            for key, _ in self.selector.select(1.0):
                rank = key.data
                chunk = self.sockets[rank].recv(1 << 20)
                *lines, self._rests[rank] = (self._rests.get(rank, b"") + chunk).split(b"\n")
                for line in lines:
                    self.received["messages"] += 1
                    self.received["bytes"] += len(line) + 1
                    self.hear(rank, json.loads(line))

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Answer a message of the coordinator."""
        if message["kind"] == "lost":
            self.say(rank, self.ready(rank, message["generation"]))
        elif message["kind"] == "form":
            if self.generation[rank] < message["generation"]:
                self.generation[rank] = message["generation"]
            self.say(rank, {"kind": "formed", "generation": message["generation"]})

    def die(self, rank: int) -> None:
        """End a rank."""
        self.selector.unregister(self.sockets[rank])
        self.sockets[rank].close()
        del self.generation[rank]


def one_death(count: int) -> dict[str, float]:
    """Return the cost of one death among so many ranks."""
    coordinator = Coordinator(count, "127.0.0.1")
    os.environ[TOKEN] = coordinator.token
    try:
        ranks = Ranks(coordinator, count)
        ranks.until_formed(1)
        settings = {"least": 1, "wait_seconds": 600.0, "fence_seconds": 600.0, "replacements": None}
        for rank in range(count):
            ranks.say(rank, {"kind": "trains", "settings": settings})
        while coordinator.side.phase != "run" or not all(
            each.trains for each in list(coordinator._peers)
        ):
            time.sleep(0.01)
        ranks.sent.clear()
        ranks.received.clear()
        began = time.monotonic()
        ranks.die(count // 2)
        ranks.until_formed(2)
        return {
            "seconds": time.monotonic() - began,
            "messages": float(ranks.sent["messages"] + ranks.received["messages"]),
            "bytes": float(ranks.sent["bytes"] + ranks.received["bytes"]),
        }
    finally:
        coordinator.close()


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1000])
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("ranks  messages  MB  seconds")
    for count in options.ranks:
        found = one_death(count)
        print(
            f"{count:5}  {found['messages']:8.0f}  {found['bytes'] / 1e6:.3g}  {found['seconds']:.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
