"""A thread for each rank that watches the training thread: what its time is spent on, and a report where training hangs.

The events of the training say which part of it is under way. The operating system says whether the training thread runs or sleeps: one that
waits in a collective sleeps, and one that computes there does not. The training thread may be stuck where no Python runs, so ranks tell
each other by the store of the job what they do, without a collective. On an accelerator, whose collectives return at once, a thread
that does not move while the device has work waits for it.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
import os
import random
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from danling.distributed import collective_timeout, default_store
from danling.reporting.rank_times import ACTIVITIES, RankTimes
from danling.utils.files import write_atomically
from danling.utils.messages import clause
from danling.utils.observers import Observer

from .stacks import (
    OF_MODULES,
    WatchedThread,
    collective_of,
    excuse_of,
    frames_of,
    location_of,
    stack_text,
)

if TYPE_CHECKING:
    from danling.distributed import CollectiveCalls
    from danling.reporting import Reporter
    from danling.runners.torch_runner import TorchRunner
    from danling.training.session import TrainingSession

logger = logging.getLogger("danling")

WARNING, LIMIT = "warning", "limit"
"""The two alarms: an update takes far longer than others, and the time limit of a collective is near."""

_FAR_LONGER = 10
"""How many times longer than the longest update of late one takes that is taken for a hang."""
_KEPT_UPDATES = 256
_SECONDS_BETWEEN_LOOKS = 0.05
"""A look takes some ten microseconds of the interpreter."""
_SECONDS_BETWEEN_CHECKS = 1.0
_GRACE_SECONDS = 3.0
"""How long a sign of another rank, or an answer of the store, may take."""
_SPEAKERS = 8
"""Ranks that may report, each only if those before it do not: each of them asks the store for the states of all."""
_STOPPED_SECONDS = 5.0
"""A check that comes so late says that this process was stopped, or its machine asleep."""
_DEVICE = "work of the device"

_MAY_TAKE_LONG = ("evaluating", "checkpointing")
"""Activities of a rank that may take any time while it computes, or waits for one that does."""


@dataclass(frozen=True)
class RankState:
    """What a rank does while no update ends: whether it sleeps within communication, in which collective and where that was called, where
    it is and its stack, why this may take any time, when this was noted, and of which module weights or gradients are communicated.
    """

    rank: int
    host: str
    waits: bool
    collective: str
    called: str
    location: str
    stack: str
    excuse: str
    time: float
    module: str = ""

    def __str__(self) -> str:
        if self.waits:
            called = f", called at {self.called}" if self.called else ""
            module = f" of the module {self.module}" if self.module else ""
            return f"waits in {self.collective or 'communication'}{module}{called}"
        return f"at {self.location}" + (f" ({self.excuse})" if self.excuse else "")


class RankWatch(Observer):
    """Watches the training thread of this rank: adds up what it does, and reports once where an update takes far longer than others, and
    before the time limit of a collective ends the job.

    Args:
        runner: The runner that trains, in the thread that calls this.
        session: Its session.
        reporter: What reports the times of the ranks.
        calls: Which method each rank has called.
        seconds: From one look to the next, on average; `None` is 0.05, and 1 where only hangs are looked for.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        reporter: Reporter,
        calls: CollectiveCalls | None,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._train, self._clock = runner, runner.state.train, clock
        self._session = session
        self._reporter = reporter
        self._calls = calls
        self._domain, self._rank = runner.placement.optimizer, runner.placement.optimizer.rank
        self._share, self._least = (
            runner.config.comm.slow_rank_share,
            runner.config.comm.hang_warning_seconds,
        )
        self._seconds = seconds or (
            _SECONDS_BETWEEN_LOOKS if self._share is not None else _SECONDS_BETWEEN_CHECKS
        )
        self.hosts: list[tuple[str, int]] = [("", 0)] * self._domain.size
        """Machine and process of each rank, once a training has begun."""
        self._directory = runner.workspace.dir / "hangs"
        self._store: Any = None
        self._has_written = False
        self._thread = WatchedThread(on_accelerator=runner.device.type != "cpu")
        self._parts: tuple[str, ...] = ()
        self._last = clock()
        self._sums = [0.0] * len(ACTIVITIES)
        self._looks = 0
        self._updates: deque[float] = deque(maxlen=_KEPT_UPDATES)
        self._seen: tuple[int, int] | None = None
        self._has_updated = False
        self._checked = self._quiet_since = self._idle_since = self._waits_since = time.monotonic()
        self._cpu_before = 0.0
        self._at: tuple[int, int] | None = None
        self._at_since = self._checked
        self._dumped = self._said = ""
        # Looks at even intervals could fall on the same place of every update. The program's own numbers are left alone.
        self._dice = random.Random(self._rank)
        self._stopping = threading.Event()
        # In the context of the training, so that its lines are in the log of that run alone.
        context = contextvars.copy_context()
        self._watcher = threading.Thread(
            target=context.run, args=(self._run,), name="danling-rank-watch", daemon=True
        )

    @classmethod
    def of(
        cls,
        runner: TorchRunner,
        session: TrainingSession,
        reporter: Reporter,
        calls: CollectiveCalls | None,
    ) -> RankWatch | None:
        """Return the watch of a training that begins, for the thread that calls this; `None` without other ranks, or where it is off."""
        settings = runner.config.comm
        is_off = settings.slow_rank_share is None and settings.hang_warning_seconds is None
        # Its figures take a collective at each log line, in which an elastic rank may end.
        is_off = is_off or runner.config.elastic.enabled
        if is_off or runner.placement.optimizer.size == 1:
            return None
        return cls(runner, session, reporter, calls)

    # Events

    def training_started(self) -> None:
        self.hosts = self._domain.gather_objects((socket.gethostname(), os.getpid()))
        if self._share is not None:
            self._reporter.rank_times = RankTimes(self, self._share)
        self._watcher.start()

    def training_ended(self) -> None:
        self._reporter.rank_times = None
        if not self._stopping.is_set():
            self._stopping.set()
            # A store that does not answer must not hold up the end.
            self._watcher.join(1.0)
            if not self._watcher.is_alive():
                self._thread.close()

    def batch_wait_started(self) -> None:
        self._parts = (*self._parts, "data")

    def evaluation_started(self, split: str) -> None:
        self._parts = (*self._parts, "evaluating")

    def save_started(self) -> None:
        self._parts = (*self._parts, "checkpointing")

    def batch_wait_ended(self) -> None:
        self._parts = self._parts[:-1]

    def evaluation_ended(self, split: str) -> None:
        self._parts = self._parts[:-1]

    def save_ended(self) -> None:
        self._parts = self._parts[:-1]

    def _part(self) -> str:
        """Return the part of the training that is under way; before the first update and after the last one that is `checkpointing`."""
        # Read once: the training thread replaces the tuple at any time.
        parts = self._parts
        if parts:
            return parts[-1]
        return "computing" if self._session.running else "checkpointing"

    # Looks, of which times are made

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while not self._stopping.wait(self._seconds * self._dice.uniform(0.5, 1.5)):
                self.look()
                if time.monotonic() >= due:
                    self._check()
                    due = time.monotonic() + _SECONDS_BETWEEN_CHECKS
        except Exception:
            # Nothing that goes wrong here may end the training.
            logger.exception(
                "The thread that watches rank %d has failed; the training continues without it.",
                self._rank,
            )

    def look(self) -> str:
        """Look once, count the time since the last look for the activity that it sees, and return that activity."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        part = self._part()
        seen = "waiting" if part != "data" and self._thread.waits(self._thread.frame()) else part
        self._sums[ACTIVITIES.index(seen)] += seconds
        self._looks += 1
        return seen

    def take(self) -> tuple[Sequence[float], int]:
        """Return the seconds by activity since the last call, and the number of looks. May be called from another thread than `look`."""
        taken, self._sums = self._sums, [0.0] * len(ACTIVITIES)
        looks, self._looks = self._looks, 0
        return taken, looks

    # Checks, of which reports of a hang are made

    def _check(self) -> None:
        """See whether the update ends; where it takes long, tell the other ranks what this one does, and report where it is too long."""
        now = time.monotonic()
        gap, self._checked = now - self._checked, now
        if self._seen != (self._train.global_step, self._train.skipped_updates):
            self._begin(now)
            return
        # Three clocks, all of which an update that ends sets anew: since when no update has ended,
        # since when nothing excuses that, and since when this rank waits in one collective.
        if gap > _STOPPED_SECONDS:
            self._quiet_since += gap
            self._idle_since += gap
            self._waits_since = now
        mine = self._state()
        at = self._thread.instruction()
        if at != self._at:
            self._at, self._at_since = at, now
        # A thread that sleeps at each look, and has run in between, was in several collectives. One
        # that waits for the device may spin.
        has_run = self._thread.cpu_seconds() - self._cpu_before > 0.005 * gap
        self._cpu_before = self._thread.cpu_seconds()
        if not mine.waits or (has_run and mine.collective != _DEVICE):
            self._waits_since = now
        least = self._least or math.inf
        warns_after = max(least, _FAR_LONGER * max(self._updates, default=0.0))
        # An evaluation may take any time, but not in one collective, unless another rank computes.
        is_in_one = mine.excuse in _MAY_TAKE_LONG and now - self._waits_since > warns_after
        if mine.excuse and not is_in_one:
            self._idle_since = now
        limit = collective_timeout(self._runner.device) or math.inf
        # So much earlier there is just time enough to say what the ranks do.
        lead = min(max(limit / 10, 5 * _GRACE_SECONDS), 60.0, limit / 2)
        ends_after = limit - lead if limit < math.inf else math.inf
        # Most checks end here: the store is not asked before half of the time to an alarm is over.
        if now - self._quiet_since <= min(warns_after, ends_after) / 2:
            return
        if not mine.waits and not mine.excuse and self._at_since < now and self._device_works():
            # A collective of an accelerator returns at once: the host waits later, wherever it reads a number. Only a thread that has
            # not moved is taken for waiting, and the device is asked only now: a query would break the capture of a graph.
            mine = replace(mine, waits=True, collective=_DEVICE, called=mine.location)
        if mine.collective == _DEVICE:
            self._waits_since = min(self._waits_since, max(self._at_since, self._quiet_since))
        self._tell(f"state/{self._rank}", json.dumps(asdict(mine)))
        alarm = self._ask("alarm")
        if alarm and alarm != self._dumped:
            self._dumped = alarm
            self._dump(mine)
        if now - self._waits_since > ends_after and alarm != LIMIT:
            alarm = LIMIT
            self._tell("alarm", alarm)
        elif not alarm and now - self._idle_since > warns_after:
            alarm = WARNING
        if alarm and self._said not in (alarm, LIMIT) and self._rank < _SPEAKERS:
            self._look_around(alarm, now, min(_GRACE_SECONDS, lead / 4))

    def _begin(self, now: float) -> None:
        """Begin to wait for the end of an update."""
        before, self._seen = self._seen, (self._train.global_step, self._train.skipped_updates)
        if before is not None:
            # The time of an evaluation or a save, with which the clock was set anew, is not in it; nor is the first update.
            if self._has_updated:
                self._updates.append((now - self._idle_since) / max(self._seen[0] - before[0], 1))
            self._has_updated = True
        # An alarm of the last update must not count for the next one.
        if self._has_written:
            for key in ("alarm", "said", f"state/{self._rank}"):
                self._tell(key, "")
        self._has_written = False
        self._quiet_since = self._idle_since = self._waits_since = now
        self._cpu_before = self._thread.cpu_seconds()
        self._dumped = self._said = ""
        self._asked: tuple[float, dict[int, RankState | None]] | None = None

    def _look_around(self, alarm: str, now: float, grace: float) -> None:
        """Ask twice what the ranks do, and report it: a rank whose state was not noted anew in between gives no sign any more."""
        if self._asked is None:
            # Each speaker leaves those before it the time that they need.
            self._asked = now + 2 * grace * self._rank, {}
        since, before = self._asked
        if now < since:
            return
        texts = {rank: self._ask(f"state/{rank}") for rank in range(self._domain.size)}
        states = {
            rank: RankState(**json.loads(text)) if text else None for rank, text in texts.items()
        }
        excuses = {state.excuse for state in states.values() if state is not None and state.excuse}
        all_wait = all(state is not None and state.waits for state in states.values())
        # Nor is known before the second update how long one takes.
        excused = bool(excuses.difference(_MAY_TAKE_LONG)) or (
            not all_wait and bool(excuses or not self._updates)
        )
        # Before the time limit nothing is excused: the job ends in any case.
        if alarm == WARNING and excused:
            self._idle_since = now
            self._asked = None
            return
        if not before:
            # One speaker reports for all.
            if self._ask("said") in (alarm, LIMIT):
                self._said = alarm
                return
            self._tell("alarm", alarm)
            before.update(states)
            return
        signs = {
            rank: state if state != before[rank] or rank == self._rank else None
            for rank, state in states.items()
        }
        # On a busy machine the thread of a rank may get no turn for some seconds.
        if now < since + (2 * grace if None in signs.values() else grace):
            return
        self._asked = None
        self._said = alarm
        self._tell("said", alarm)
        self._report(alarm, now, states, signs)

    def _report(
        self,
        alarm: str,
        now: float,
        states: Mapping[int, RankState | None],
        signs: Mapping[int, RankState | None],
    ) -> None:
        """Log what the ranks do: by their last `states`, of which those that were noted anew are their `signs`."""
        head = f"Update {self._train.global_step + 1} has not come to its end in {now - self._quiet_since:.0f} s"
        if self._updates:
            head += f"; those before it took up to {max(self._updates):.2g} s"
        limit = collective_timeout(self._runner.device)
        if alarm == LIMIT:
            head += f". A collective may take {limit:g} s, after which the job ends"
        else:
            head += ". comm.train_timeout_seconds sets after how long such a wait ends the job"
            head += f"; now it is {limit:g} s" if limit is not None else ""
        silent = {
            rank: self._fate(rank, states[rank]) for rank, sign in signs.items() if sign is None
        }
        there = [sign for sign in signs.values() if sign is not None]
        calls = self._calls
        apart = calls.differences(self._opened_store()[0]) if calls is not None else ""
        if apart:
            head += f". The ranks are in different calls: {apart}. Make each of them on all ranks"
        logger.warning(
            "%s. The stacks of all threads are in %s.\n%s",
            head,
            self._directory,
            report(there, silent),
        )

    def _state(self) -> RankState:
        frame = self._thread.frame()
        part = self._part()
        waits = part != "data" and self._thread.waits(frame)
        collective, called = collective_of(frame) if waits else ("", "")
        if (
            self._runner.device.type != "cpu"
            and frame is not None
            and frame.f_code.co_name == "synchronize"
        ):
            waits = True
            collective = _DEVICE
        excuse = excuse_of(frame) or (part if part in _MAY_TAKE_LONG else "")
        host = self.hosts[self._rank][0]
        location = location_of(frame)
        stack = stack_text(frame)
        # FSDP2 gathers a module within its hooks: which one that is no argument of the collective says.
        is_of_module = waits and any(
            found.f_code.co_filename.startswith(OF_MODULES) for found in frames_of(frame)
        )
        module = self._runner.preparation.communicated_module() if is_of_module else ""
        return RankState(
            self._rank,
            host,
            waits,
            collective,
            called,
            location,
            stack,
            excuse,
            time.time(),
            module,
        )

    def _device_works(self) -> bool:
        """Return whether something that was queued on the accelerator has not ended, such as a collective that lacks a rank."""
        if self._runner.device.type == "cpu":
            return False
        try:
            return not torch.accelerator.current_stream(self._runner.device).query()
        except RuntimeError:
            # The device has failed, which the training thread finds out by itself.
            return False

    def _fate(self, rank: int, last: RankState | None) -> str:
        host, pid = self.hosts[rank]
        was = f", last {last}" if last is not None else ""
        return f"process {pid} on {host}{was}{fate_of(pid) if host == self.hosts[self._rank][0] else ''}"

    def _dump(self, mine: RankState) -> None:
        """Write the stacks of all threads of this process."""
        step, (host, pid) = self._train.global_step, self.hosts[self._rank]
        file = self._directory / f"step-{step:012d}-rank-{self._rank:05d}.txt"
        texts = [f"Rank {self._rank}, process {pid} on {host}, after step {step}: {mine}\n"]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                texts.append(
                    f"Thread {names.get(thread, thread)} (most recent call last):\n{stack_text(frame)}"
                )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "\n".join(texts))
        except OSError as error:
            text = clause(error)
            logger.warning("The stacks of rank %d cannot be written: %s.", self._rank, text)

    # Notes of the ranks for each other

    def _opened_store(self) -> tuple[Any, str]:
        if self._store is None:
            # A separate connection: a thread that waits in the store does not hold this one up.
            store: Any = default_store()
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=_GRACE_SECONDS))
        return self._store, f"danling/watch/{self._session.training}/"

    def _tell(self, key: str, text: str) -> None:
        store, prefix = self._opened_store()
        store.set(prefix + key, text)
        self._has_written = True

    def _ask(self, key: str) -> str:
        store, prefix = self._opened_store()
        return str(store.get(prefix + key).decode()) if store.check([prefix + key]) else ""


def fate_of(pid: int) -> str:
    """Return what became of a process of this machine."""
    try:
        os.kill(pid, 0)
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except ProcessLookupError:
        return ", which is no more"
    except OSError:
        return ""
    states = {
        "T": ", which is stopped (SIGSTOP)",
        "t": ", which is stopped by a debugger",
        "Z": ", which is no more",
        "R": f", busy in code that leaves other threads no turn; `py-spy dump --pid {pid}` shows where",
    }
    return states.get(state, f", stuck where no Python runs; `py-spy dump --pid {pid}` shows where")


def report(states: Sequence[RankState], silent: Mapping[int, str]) -> str:
    """Return what ranks do: their stacks, then the ranks that wait, and last those that they wait for."""
    stacks: defaultdict[str, list[RankState]] = defaultdict(list)
    doing: defaultdict[tuple[bool, str], list[RankState]] = defaultdict(list)
    for state in states:
        stacks[state.stack].append(state)
        doing[state.waits, str(state)].append(state)
    # Hundreds of ranks have a few stacks, each of which is printed once.
    lines = [
        f"{_named(alike)} (most recent call last):\n{stack.rstrip()}"
        for stack, alike in stacks.items()
    ]
    # The largest group waits for the others.
    groups = sorted(doing.items(), key=lambda group: (not group[0][0], -len(group[1])))
    for (waits, what), alike in groups:
        several = len(alike) > 1
        if waits:
            text = what.replace("waits", "wait", 1) if several else what
        else:
            text = (
                f"{'are' if several else 'is'} {'not in it, but ' if groups[0][0][0] else ''}{what}"
            )
        lines.append(f"{_named(alike)} {text}.")
    if len({state.module for state in states if state.waits}) > 1:
        lines.append(
            "Not all ranks run the same modules in the same order, by which FSDP2 matches them."
        )
    return "\n".join(
        [*lines, *(f"Rank {rank} gives no sign: {fate}." for rank, fate in silent.items())]
    )


def _named(states: Sequence[RankState]) -> str:
    """Return the ranks of states in short, such as `Ranks 0-2, 5`, and their machine if it is one."""
    spans: list[list[int]] = []
    for state in states:
        if spans and spans[-1][-1] == state.rank - 1:
            spans[-1].append(state.rank)
        else:
            spans.append([state.rank])
    ranks = ", ".join(
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    )
    hosts = {state.host for state in states}
    return f"Rank{'s' if len(states) > 1 else ''} {ranks}" + (
        f" on {hosts.pop()}" if len(hosts) == 1 else ""
    )
