"""The agent of a machine: torchrun's own, which replaces a rank that ends instead of ending all.

Rendezvous, logs, error files and signals are those of torch's `LocalElasticAgent`.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry

from .coordinator import Coordinator
from .spare import Spare
from .wire import ADDRESS, JOINS, MACHINE, TOKEN, Closed, connect, machine_name

logger = logging.getLogger("danling")

_LOOK_SECONDS = 0.1
_STORE_KEY = "danling/elastic/coordinator"
_CONNECT_SECONDS = 60.0
_EXIT_SECONDS = 300.0
"""How long the agent of the first machine waits for the others at the end, as torchrun does."""


@dataclass(frozen=True)
class Launch:
    """What `danling run` starts.

    Attributes:
        program: The command, such as `("python", "train.py")`.
        ranks: Ranks on this machine.
        machines: Number of machines, on each of which an agent runs.
        endpoint: Where they meet, `host:port`; empty on one machine.
        run_id: Name of the job at the endpoint.
        spares: Replacements that are kept ready.
    """

    program: Sequence[str]
    ranks: int
    machines: int = 1
    endpoint: str = ""
    run_id: str = ""
    spares: int = 1


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this machine, and replaces those that end with an error while the others train."""

    def __init__(self, spec: WorkerSpec, launch: Launch) -> None:
        super().__init__(spec, DefaultLogsSpecs(redirects=Std.NONE), start_method="spawn")
        self._launch = launch
        self._coordinator: Coordinator | None = None
        self._link: AgentLink | None = None
        self._spares: list[Spare] = []
        self._variables: dict[str, str] = {}
        self._starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.close()
        self._starts += 1
        key = f"{_STORE_KEY}/{self._starts}"
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            world_size = sum(1 for _ in worker_group.workers) * int(worker_group.group_world_size or 1)
            self._coordinator = Coordinator(world_size, "" if self._launch.endpoint else "127.0.0.1")
            host = str(worker_group.master_addr)
            store.set(key, f"{self._coordinator.token} {host}:{self._coordinator.port}")
        token, _, address = bytes(store.get(key)).decode().partition(" ")
        # The agent adds its environment to that of each process.
        self._variables = {ADDRESS: address, TOKEN: token}
        if self._launch.machines > 1:
            self._variables[MACHINE] = f"{socket.gethostname()}, machine {worker_group.group_rank}"
        os.environ.update(self._variables)
        self._link = AgentLink(address, int(worker_group.group_rank or 0))
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._link.pids = set(started.values())
        self._fill_spares()
        return started

    def _fill_spares(self) -> None:
        is_python = os.path.basename(self._launch.program[0]).startswith("python")
        self._spares = [spare for spare in self._spares if spare.is_alive]
        while is_python and len(self._spares) < self._launch.spares:
            self._spares.append(Spare(self._launch.program[0]))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext
        coordinator, link = self._coordinator, self._link
        assert link is not None
        if coordinator is not None and coordinator.verdict:
            logger.error("%s", coordinator.verdict)
            return RunResult(state=WorkerState.FAILED)
        for rank, handler in list(context.subprocess_handlers.items()):
            code = handler.proc.poll()
            if (
                code is not None
                and rank in context._running_local_ranks
                and link.should_replace(handler.proc.pid, code)
            ):
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                logger.warning("Process %d %s: a replacement is started.", handler.proc.pid, how)
                self._replace(worker_group, context, rank)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Wait for the agents of other machines, which need the store and the coordinator of the first; a lost one does not come."""
        end = time.monotonic() + _EXIT_SECONDS
        coordinator = self._coordinator
        while coordinator is not None and coordinator.has_other_machines and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _replace(self, worker_group: WorkerGroup, context: Any, rank: int) -> None:
        variables = {**context.envs[rank], **self._variables, JOINS: "1"}
        ready = [spare for spare in self._spares if spare.is_ready]
        if ready:
            self._spares.remove(ready[0])
            new: Any = ready[0].start(self._launch.program[1:], variables, rank)
        else:
            new = get_subprocess_handler(
                context.entrypoint,
                context.args[rank],
                variables,
                context.stdouts[rank],
                context.stderrs[rank],
                rank,
                context._numa_options,
            )
        context.subprocess_handlers[rank] = new
        worker_group.workers[rank].id = new.proc.pid
        assert self._link is not None
        self._link.pids = {each.proc.pid for each in context.subprocess_handlers.values()}
        self._fill_spares()

    def close(self) -> None:
        """End the coordinator and the spare processes."""
        for spare in self._spares:
            spare.close()
        self._spares = []
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None


class _FixedMachines:
    """The rendezvous of the machines, of which none is added later: torch's agent would start all ranks again for it."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def num_nodes_waiting(self) -> int:
        """Return that no machine waits."""
        return 0


class AgentLink:
    """Tells the coordinator which ranks of this machine are stopped or have ended, and ends those that it names.

    Attributes:
        pids: The ranks of this machine.
    """

    def __init__(self, address: str, machine: int) -> None:
        hello = {"agent": machine, "pid": os.getpid(), "host": machine_name()}
        self._channel, _ = connect(address, hello, seconds=_CONNECT_SECONDS)
        self.pids: set[int] = set()
        self._answer: bool | None = None
        self._answered = threading.Event()
        self._has_closed = False
        self._exits: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="danling-agent", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.socket, selectors.EVENT_READ)
            before = time.monotonic()
            while not self._has_closed:
                selector.select(_LOOK_SECONDS)
                try:
                    for message in self._channel.receive():
                        self._hear(message)
                except (Closed, ValueError):
                    return  # the agent of the first machine has ended; the ranks end by themselves
                now = time.monotonic()
                if now - before >= _LOOK_SECONDS:
                    stopped = [pid for pid in self.pids if _state(pid) == "T"]
                    self._channel.send({"kind": "stopped", "pids": stopped, "seconds": now - before})
                    before = now

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "kill" and message["pid"] in self.pids:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(message["pid"], 9)
        elif message["kind"] == "replace":
            self._answer = bool(message["may"])
            self._answered.set()

    def should_replace(self, pid: int, code: int) -> bool:
        """Say that a rank has ended, once, and return whether it is replaced."""
        if pid in self._exits:
            return False
        self._exits.add(pid)
        self._answered.clear()
        self._channel.send({"kind": "exit", "pid": pid, "code": code})
        while not self._answered.wait(_LOOK_SECONDS):
            if not self._thread.is_alive():
                return False
        return bool(self._answer)

    def close(self) -> None:
        """Leave the coordinator."""
        self._has_closed = True
        self._thread.join()
        self._channel.close()


def _state(pid: int) -> str:
    """Return the state of a process, `T` where a signal has stopped it; a debugger makes that `t`."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def run_agent(launch: Launch) -> int:
    """Run the agent of this machine until its ranks have ended, and return the exit code."""
    on_one_machine = not launch.endpoint
    options: dict[str, Any] = {"is_host": True, "local_addr": "127.0.0.1"} if on_one_machine else {}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=launch.endpoint or "127.0.0.1:0",
        run_id=launch.run_id or uuid4().hex,
        min_nodes=launch.machines,
        max_nodes=launch.machines,
        **options,
    )
    meeting: Any = _FixedMachines(registry.get_rendezvous_handler(parameters))
    spec = WorkerSpec(
        role="default",
        local_world_size=launch.ranks,
        entrypoint=launch.program[0],
        args=tuple(launch.program[1:]),
        rdzv_handler=meeting,
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
        local_addr="127.0.0.1" if on_one_machine else None,
    )
    agent = ElasticAgent(spec, launch)
    try:
        result = agent.run()
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        # The store may be gone when the first machine knows that this one has ended.
        meeting.shutdown()
        agent.close()
    if result is None or result.is_failed():
        codes = [failure.exitcode for failure in (result.failures.values() if result is not None else ())]
        return next((code if code > 0 else 128 - code for code in codes if code), 1)
    return 0


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command to start: a script alone is run by this Python."""
    if words and words[0].endswith(".py"):
        return (sys.executable, "-u", *words)
    return tuple(words)
