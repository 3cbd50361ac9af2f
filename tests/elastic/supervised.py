"""Elastic ranks as forks of one process that has torch: a replacement is there in milliseconds, as a spare of the agent is.

The coordinator and the link of an agent are the library's own; only the start of processes is done here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from danling.elastic.agent import AgentLink
from danling.elastic.coordinator import Coordinator
from danling.elastic.wire import ADDRESS, JOINS, TOKEN

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "danling", "elastic.plain_loop", "elastic.training"])


@dataclass
class Ended:
    """How a job of elastic ranks ended: exit codes in the order of the ends, what ranks have noted, the verdict of the coordinator."""

    codes: list[int]
    notes: list[dict[str, Any]]
    verdict: str
    seconds: float
    gaps: list[float] = field(default_factory=list)

    @property
    def hashes(self) -> set[str]:
        return {note["end"] for note in self.notes if "end" in note}

    @property
    def repeated(self) -> int:
        return max((note["repeated"] for note in self.notes if "end" in note), default=0)


def _enter(function: Callable[[], object], variables: Mapping[str, str], directory: str) -> None:
    os.environ.update(variables)
    os.chdir(directory)
    os.setsid()
    function()


def run_ranks(
    function: Callable[[], object],
    ranks: int,
    report: Path,
    *,
    timeout: float = 120.0,
    variables: Mapping[str, str] | None = None,
    continue_after: float | None = None,
) -> Ended:
    """Run a function as elastic ranks until all have ended.

    Args:
        function: Of a test module; run in each process.
        ranks: How many.
        report: A file to which ranks append lines of JSON.
        timeout: Seconds until everything is killed.
        variables: Environment.
        continue_after: Seconds after which a stopped rank is continued.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = Coordinator(ranks, "127.0.0.1")
    report.touch()
    common = {
        **(variables or {}),
        ADDRESS: f"127.0.0.1:{coordinator.port}",
        TOKEN: coordinator.token,
        "REPORT": str(report),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    os.environ[TOKEN] = coordinator.token
    link = AgentLink(common[ADDRESS], 0)
    living: dict[int, BaseProcess] = {}

    def start(rank: int, *, joins: bool) -> None:
        own = {**common, "ELASTIC_CHILD": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), JOINS: "1" if joins else "0"}
        process = _CONTEXT.Process(target=_enter, args=(function, own, os.getcwd()))
        process.start()
        assert process.pid is not None
        living[rank] = process
        link.pids = {each.pid for each in living.values() if each.pid is not None}

    began = time.monotonic()
    codes: list[int] = []
    try:
        for rank in range(ranks):
            start(rank, joins=False)
        while living and time.monotonic() - began < timeout:
            time.sleep(0.01)
            for rank, process in list(living.items()):
                if continue_after is not None and _is_stopped(process.pid):
                    threading.Timer(continue_after, _continue, [process.pid]).start()
                if process.is_alive():
                    continue
                codes.append(int(process.exitcode or 0))
                del living[rank]
                if link.should_replace(int(process.pid or 0), codes[-1]):
                    start(rank, joins=True)
        hung = [process.pid for process in living.values()]
    finally:
        for process in living.values():
            process.kill()
            process.join()
        link.close()
        verdict = coordinator.verdict
        coordinator.close()
    notes = [json.loads(line) for line in report.read_text().splitlines()]
    if hung:
        verdict = verdict or f"processes {hung} did not end"
    return Ended(codes, notes, verdict, time.monotonic() - began, _gaps(notes))


def _gaps(notes: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from each fault to the first update that was made by those that were left."""
    again = sorted(note["again"] for note in notes if "again" in note)
    struck = sorted(note["struck"] for note in notes if "struck" in note)
    return [next((after - at for after in again if after > at), 0.0) for at in struck]


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
