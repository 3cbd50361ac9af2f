"""The agent of a machine: torchrun's own, which replaces a rank that ends instead of ending all.

Rendezvous, logs, error files and signals are those of torch's `LocalElasticAgent`.
"""

from __future__ import annotations

import logging
import os
import selectors
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry

from danling.utils.plain import parse_json
from danling.utils.process import ERROR_FILE, LAUNCH_COMMAND

from .coordinator import Coordinator, describe_exit
from .spare import Spare
from .wire import ADDRESS, JOINS, MACHINE, TOKEN, Closed, connect, machine_name

logger = logging.getLogger("danling")

_LOOK_SECONDS = 0.1
_STORE_KEY = "danling/elastic/coordinator"
_CONNECT_SECONDS = 60.0
_EXIT_SECONDS = 300.0
"""How long the agent of the first machine waits for the others at the end, as torchrun does."""
_SECOND_STOP_SECONDS = 5
"""How long ranks have to end after a second signal."""
_DEFAULT_RUN_ID = "danling"


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

    @property
    def command(self) -> str:
        """The command line up to the program."""
        words = ["danling", "run", "--ranks", str(self.ranks)]
        if self.endpoint:
            words += ["--nnodes", str(self.machines), "--rdzv-endpoint", self.endpoint]
            words += ["--rdzv-id", self.run_id] if self.run_id != _DEFAULT_RUN_ID else []
        words += ["--spares", str(self.spares)] if self.spares != 1 else []
        return shlex.join([*words, "--"])


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this machine, and replaces those that end with an error while the others train."""

    def __init__(self, spec: WorkerSpec, launch: Launch) -> None:
        super().__init__(spec, DefaultLogsSpecs(redirects=Std.NONE), start_method="spawn")
        self._launch = launch
        self._coordinator: Coordinator | None = None
        self._link: AgentLink | None = None
        self._spares: list[Spare] = []
        self._variables: dict[str, str] = {}
        self._starts = self._stops = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.close()
        self._starts, self._stops = self._starts + 1, 0
        key = f"{_STORE_KEY}/{self._starts}"
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            world_size = sum(1 for _ in worker_group.workers) * int(
                worker_group.group_world_size or 1
            )
            self._coordinator = Coordinator(
                world_size, "" if self._launch.endpoint else "127.0.0.1"
            )
            host = str(worker_group.master_addr)
            store.set(key, f"{self._coordinator.token} {host}:{self._coordinator.port}")
        token, _, address = bytes(store.get(key)).decode().partition(" ")
        # The agent adds its environment to that of each process.
        self._variables = {ADDRESS: address, TOKEN: token, LAUNCH_COMMAND: self._launch.command}
        if self._launch.machines > 1:
            self._variables[MACHINE] = f"{socket.gethostname()}, machine {worker_group.group_rank}"
        os.environ.update(self._variables)
        self._link = AgentLink(address, int(worker_group.group_rank or 0))
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._link.pids = set(started.values())
        self._fill_spares()
        return started

    def _fill_spares(self) -> None:
        # A spare is a Python that has imported torch: no other program can run in it.
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
        ends = False
        for rank in sorted(context._running_local_ranks):
            handler = context.subprocess_handlers[rank]
            code = handler.proc.poll()
            if code is None:
                continue
            _show_error(context.envs[rank])
            is_replaced = link.should_replace(handler.proc.pid, code)
            if not (is_replaced or link.others_continue):
                ends = True
                continue
            what = "a replacement is started"
            if not is_replaced:
                what = "it is not replaced, and the others continue"
                # torch's agent would end all ranks.
                context._running_local_ranks.discard(rank)
            logger.warning("Process %d %s: %s.", handler.proc.pid, describe_exit(code), what)
            if is_replaced:
                self._replace(worker_group, context, rank)
        if not ends and context._running_local_ranks:
            # torch's agent looks itself, and would end all ranks for one that has ended since.
            return RunResult(state=WorkerState.HEALTHY)
        if not context._running_local_ranks and not link.is_complete:
            # Ranks of other machines are left, or the coordinator is about to say that none is.
            return RunResult(state=WorkerState.HEALTHY if link.is_alive else WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Wait for the agents of other machines, which need the store and the coordinator of the first; a lost one does not come."""
        end = time.monotonic() + _EXIT_SECONDS
        coordinator = self._coordinator
        while coordinator is not None and coordinator.has_other_machines and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks; a second signal does not wait for what they do at the first one."""
        self._stops += 1
        if self._stops > 1:
            death_sig, timeout = signal.SIGINT, _SECOND_STOP_SECONDS
        super()._shutdown(death_sig, timeout)

    def _replace(self, worker_group: WorkerGroup, context: Any, rank: int) -> None:
        variables = {**context.envs[rank], **self._variables, JOINS: "1"}
        new: Any = None
        for spare in [each for each in self._spares if each.is_ready]:
            self._spares.remove(spare)
            new = spare.start(self._launch.program[1:], variables, rank)
            if new is not None:
                break
        if new is None:
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
        """End the coordinator and the spare processes, and ranks that signals have not ended."""
        context: Any = self._pcontext
        for handler in context.subprocess_handlers.values() if context is not None else ():
            if handler.proc.poll() is None:
                with suppress(ProcessLookupError):  # it has just ended
                    handler.close(signal.SIGKILL)
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
        others_continue: Whether the others continue without the rank that ended last, if it is not replaced.
        is_complete: Whether the training is complete.
    """

    def __init__(self, address: str, machine: int) -> None:
        hello = {"agent": machine, "pid": os.getpid(), "host": machine_name()}
        self._channel, _ = connect(address, hello, seconds=_CONNECT_SECONDS)
        self.pids: set[int] = set()
        self.others_continue = self.is_complete = False
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
                    states = {pid: _state(pid) for pid in self.pids}
                    stopped = [pid for pid, state in states.items() if state == "T"]
                    traced = [pid for pid, state in states.items() if state == "t"]
                    message = {
                        "kind": "stopped",
                        "pids": stopped,
                        "traced": traced,
                        "seconds": now - before,
                    }
                    self._channel.send(message)
                    before = now

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "kill" and message["pid"] in self.pids:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(message["pid"], 9)
        elif message["kind"] == "replace":
            self._answer = bool(message["may"])
            self.others_continue = bool(message["others_continue"])
            self._answered.set()
        elif message["kind"] == "complete":
            self.is_complete = True

    @property
    def is_alive(self) -> bool:
        """Whether there is a coordinator."""
        return self._thread.is_alive()

    def should_replace(self, pid: int, code: int) -> bool:
        """Say that a rank has ended, once, and return whether it is replaced."""
        self.others_continue = False
        if pid in self._exits:
            return False
        self._exits.add(pid)
        self._answered.clear()
        self._channel.send({"kind": "exit", "pid": pid, "code": code})
        while not self._answered.wait(_LOOK_SECONDS):
            if not self.is_alive:
                return False
        return bool(self._answer)

    def close(self) -> None:
        """Leave the coordinator."""
        self._has_closed = True
        self._thread.join()
        self._channel.close()


def _show_error(variables: Mapping[str, str]) -> None:
    """Print the traceback that a rank has left for torchrun, which prints it at the end, and make room for that of its replacement."""
    file = Path(variables.get(ERROR_FILE, ""))
    try:
        found = parse_json(file.read_text(encoding="utf-8"))["message"]
        text = found if isinstance(found, str) else found["extraInfo"]["py_callstack"]
        file.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        return
    sys.stderr.write(f"{text.rstrip()}\n")
    sys.stderr.flush()


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
        # torch would end all ranks and start them again.
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
        codes = [
            failure.exitcode for failure in (result.failures.values() if result is not None else ())
        ]
        return next((code if code > 0 else 128 - code for code in codes if code), 1)
    return 0


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command to start: a script alone is run by this Python."""
    if words and words[0].endswith(".py"):
        return (sys.executable, "-u", *words)
    return tuple(words)
