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
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from danling.elastic.agent import AgentLink
from danling.elastic.coordinator import Coordinator
from danling.elastic.wire import ADDRESS, JOINS, TOKEN

from . import training
from .wire import Wire

_LONGEST_SILENCE = 100.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "danling", "elastic.plain_loop", "elastic.training"]
)


@dataclass
class Ended:
    """How a job of elastic ranks ended: exit codes in the order of the ends, what ranks have noted, the verdict of the coordinator."""

    codes: list[int]
    notes: list[dict[str, Any]]
    verdict: str
    seconds: float
    gaps: list[float] = field(default_factory=list)
    lost_agent: bool = False

    @property
    def ends(self) -> list[dict[str, Any]]:
        """What ranks have noted that have come to the end."""
        return [note for note in self.notes if "end" in note]

    @property
    def hashes(self) -> set[str]:
        return {note["end"] for note in self.ends}

    @property
    def repeated(self) -> int:
        return max((note["repeated"] for note in self.ends), default=0)

    def check_changes(self) -> None:
        """Expect a training that has come to its end through changes, in each of which at most one update was made again."""
        assert not self.verdict
        assert any(note["changes"] for note in self.ends)
        assert all(note["repeated"] <= len(note["changes"]) for note in self.ends)


def train_ranks(
    ranks: int,
    directory: Path,
    *,
    faults: str = "",
    settings: Mapping[str, Any] | None = None,
    elastic: Mapping[str, Any] | None = None,
    function: Callable[[], object] = training.elastic_rank,
    **variables: str,
) -> Ended:
    """Train on elastic ranks in a directory until all have ended."""
    variables = {
        "FAULTS": faults,
        "ROOT": str(directory),
        "SETTINGS": json.dumps(settings or {}),
        "ELASTIC": json.dumps(elastic or {}),
        **variables,
    }
    return run_ranks(function, ranks, directory / "report", variables=variables)


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
    continue_after: Callable[[], float] | None = None,
    disturb: Callable[[Collection[BaseProcess], Collection[int]], None] | None = None,
    wire: Wire | None = None,
    end_agent_after: float | None = None,
    asks_for_stacks: bool = False,
) -> Ended:
    """Run a function as elastic ranks until all have ended.

    Args:
        function: Of a test module; run in each process.
        ranks: How many.
        report: A file to which ranks append lines of JSON.
        timeout: Seconds until everything is killed.
        variables: Environment.
        continue_after: Returns the seconds after which a stopped rank is continued.
        disturb: Called again and again with the processes and the ids of those that are replacements.
        wire: Carries the messages of ranks, and loses some.
        asks_for_stacks: Send SIGUSR1 to ranks that report nothing for long, at which they write where they are.
        end_agent_after: Seconds after which the coordinator is gone, as where the agent is killed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = Coordinator(ranks, "127.0.0.1")
    report.touch()
    common = {
        **(variables or {}),
        ADDRESS: f"127.0.0.1:{wire.open(coordinator.port) if wire is not None else coordinator.port}",
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
    link = AgentLink(f"127.0.0.1:{coordinator.port}", 0)
    living: dict[int, BaseProcess] = {}
    replacements: set[int] = set()
    stopped: set[int] = set()

    def start(rank: int, *, joins: bool) -> None:
        own = {
            **common,
            "ELASTIC_CHILD": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            JOINS: "1" if joins else "0",
        }
        process = _CONTEXT.Process(target=_enter, args=(function, own, os.getcwd()))
        process.start()
        assert process.pid is not None
        living[rank] = process
        if joins:
            replacements.add(process.pid)
        link.pids = {each.pid for each in living.values() if each.pid is not None}

    began = time.monotonic()
    codes: list[int] = []
    lost_agent = False
    size, changed_at = 0, began
    try:
        for rank in range(ranks):
            start(rank, joins=False)
        while living and time.monotonic() - began < timeout:
            time.sleep(0.01)
            if (
                end_agent_after is not None
                and time.monotonic() - began > end_agent_after
                and not lost_agent
            ):
                lost_agent = bool(coordinator.side.generation) and not coordinator._is_complete
                if lost_agent:
                    coordinator.close()
            if report.stat().st_size != size:
                size, changed_at = report.stat().st_size, time.monotonic()
            if asks_for_stacks and time.monotonic() - changed_at > _LONGEST_SILENCE:
                changed_at = time.monotonic()
                # No debugger: one that reads the symbols of torch stops a rank for minutes.
                for each in [process.pid for process in living.values() if process.pid is not None]:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGUSR1)
            if disturb is not None:
                disturb(living.values(), replacements)
            for rank, process in list(living.items()):
                pid = process.pid
                if (
                    continue_after is not None
                    and pid is not None
                    and pid not in stopped
                    and _is_stopped(pid)
                ):
                    threading.Timer(continue_after(), _continue, [pid, stopped]).start()
                    stopped.add(pid)
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
        if not lost_agent:
            coordinator.close()
        if wire is not None:
            wire.close()
    notes = [json.loads(line) for line in report.read_text().splitlines()]
    if hung:
        verdict = verdict or f"processes {hung} did not end"
    return Ended(codes, notes, verdict, time.monotonic() - began, _gaps(notes), lost_agent)


def _gaps(notes: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from each death of a member to the first update that was made without it."""
    again = sorted((note["again"], set(note["members"])) for note in notes if "again" in note)
    deaths = [
        note
        for note in notes
        if "struck" in note and note["how"] in ("kill", "exit") and note.get("number", -1) >= 0
    ]
    found = []
    for death in deaths:
        after = [
            at - death["struck"]
            for at, members in again
            if at > death["struck"] and death["number"] not in members
        ]
        found += after[:1]
    return found


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _continue(pid: int, stopped: set[int]) -> None:
    stopped.discard(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
