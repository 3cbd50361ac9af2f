"""Replica groups of real processes around a real lighthouse, on this machine.

with lighthouse() as address:
    with ReplicaGroup(train, config, world_size=2, lighthouse=address) as first, ReplicaGroup(...) as second:
        first.kill()
        first.start()
        values = first.values()
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from danling.torchft.member import ReplicaMember

from .job import Job
from .patience import patience
from .processes import Outcome, free_port, run_outcomes


class Lighthouse:
    """The program `torchft_lighthouse`, which notices a death after a second and a half."""

    def __init__(self, min_replicas: int = 1) -> None:
        port = free_port()
        flags = {
            "min_replicas": min_replicas,
            "join_timeout_ms": 300,
            "quorum_tick_ms": 50,
            "heartbeat_timeout_ms": 1500,
        }
        program = Path(sys.executable).with_name("torchft_lighthouse")
        bind = f"127.0.0.1:{port}"
        self._command = [
            str(program),
            "--bind",
            bind,
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        self._port = port
        self.address = f"http://{bind}"
        self.start()

    def start(self) -> None:
        """Start the program, at first or at the same address again."""
        self.job = Job(self._command, environment={"RUST_LOG": "error"})
        self.job.wait_until(lambda: _listens(self._port))

    def stop(self) -> None:
        """Kill the program."""
        self.job.__exit__()

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def note_heals(member: ReplicaMember, note: Callable[[], None]) -> None:
    """Call `note` whenever a replica group has taken over the state of another one."""
    take = member.take_over

    def noted(state: Mapping[str, Any]) -> None:
        take(state)
        note()

    member.take_over = noted  # type: ignore[method-assign]


class ReplicaGroup:
    """A group that can be killed and started again."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        lighthouse: Lighthouse | None,
        timeout: float = 120.0,
    ) -> None:
        self._function, self._args = function, args
        self._world_size, self._timeout = world_size, timeout
        self._environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address if lighthouse else ""}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        self.outcomes = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), daemon=True)
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        self.outcomes = run_outcomes(
            self._function,
            *self._args,
            world_size=self._world_size,
            timeout=self._timeout,
            environment=self._environment,
            stop=stop,
        )

    def kill(self) -> None:
        """Send SIGKILL to all of its ranks, and wait until they are gone."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def values(self) -> list[Any]:
        """Wait for the end and return what its ranks returned, by rank."""
        self.join()
        by_rank = sorted(self.outcomes, key=lambda outcome: outcome.rank)
        failed = [outcome for outcome in by_rank if outcome.error is not None]
        assert not failed, "\n".join(
            f"rank {o.rank} ({o.exit_code}): {o.error}\n{o.traceback}" for o in failed
        )
        return [outcome.value for outcome in by_rank]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait until a condition of the test holds while the group runs."""
        end = time.monotonic() + patience(timeout)
        while not condition():
            if self._thread is None or not self._thread.is_alive():
                self.values()
                assert condition(), "the group has ended too early"
            assert time.monotonic() < end, f"not seen in {timeout:g} s"
            time.sleep(0.02)

    def __enter__(self) -> ReplicaGroup:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
