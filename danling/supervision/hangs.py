"""Training that stands still: which ranks wait for which, and where the one is that they wait for.

A thread of each rank looks on, since the thread that trains may be stuck where no Python runs. What the ranks do they tell each other by
notes, without a collective.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from danling.utils.files import write_atomically

from .activity import StackReader, ThreadSleep
from .stacks import all_stacks, collective_of, excuse_of, place_of, stack_text

logger = logging.getLogger("danling")

FAR_LONGER = 10
"""How many times longer than the longest update of late one takes that is taken for a hang."""

_KEPT_UPDATES = 256
_GRACE_SECONDS = 3.0
"""How long the notes of other ranks may take."""

_SPEAKERS = 8
"""Ranks that may say what is found, each only if those before it do not: the store is asked for the notes of all by each of them."""

_CLOCKS_APART_SECONDS = 10.0
"""By how much the clocks of machines may differ."""

_DEVICE = "work of the device"

_STOPPED_SECONDS = 5.0
"""A look that comes so late says that this process was stopped, or its machine asleep."""

WARNING, LIMIT = "warning", "limit"
"""What is said: that an update takes far longer than others, and that the time limit of a collective is near."""


class Notes(Protocol):
    """Where ranks leave notes for each other; see `danling.distributed.Board`."""

    def write(self, key: str, text: str) -> None:
        """Leave a note."""

    def read(self, key: str) -> str | None:
        """Return a note, `None` where there is none."""


@dataclass(frozen=True)
class Standing:
    """What a rank does while training stands still.

    Attributes:
        rank: Its number.
        host: Its machine.
        pid: Its process there.
        waits: Whether it sleeps within communication.
        collective: The collective that it waits in; empty where it is in none.
        called: Where that was called.
        place: Where it is.
        stack: Its stack.
        excuse: Why this may take any time; empty where nothing says so.
        said: What it has said of this: `""`, `WARNING` or `LIMIT`.
        time: When it noted this, in seconds since 1970 on its machine.
    """

    rank: int
    host: str
    pid: int
    waits: bool
    collective: str
    called: str
    place: str
    stack: str
    excuse: str
    said: str
    time: float

    @classmethod
    def parsed(cls, text: str | None) -> Standing | None:
        """Return what a note says; `None` without one, or where it was taken back."""
        return cls(**json.loads(text)) if text else None


class HangWatch:
    """Says once what the ranks do where an update takes far longer than others, and before the time limit of a collective ends the job.

    Args:
        reader: Reads the stack of the thread that trains.
        thread: Number of that thread, as `threading.get_ident`.
        native_id: Number of that thread, as `threading.get_native_id`.
        progress: Returns what changes with every update.
        step: Returns the updates committed.
        board: Where the ranks tell each other what they do.
        rank: Number of this rank.
        size: Number of ranks.
        place: Place of this rank among those that say what is found: 0 for the one that has the log.
        least: Seconds that an update must take before anything is said; `None` for no warning.
        limit: Returns the seconds that a collective may take, `None` where that is not known.
        directory: Returns where the stacks are written.
        waits_on_device: Whether a thread that waits for the device may wait for other ranks there.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        reader: StackReader,
        *,
        thread: int,
        native_id: int,
        progress: Callable[[], object],
        step: Callable[[], int],
        board: Notes,
        rank: int,
        size: int,
        place: int,
        least: float | None,
        limit: Callable[[], float | None],
        directory: Callable[[], Path],
        waits_on_device: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._thread = thread
        self._sleeps = ThreadSleep(native_id)
        self._cpu = _CpuTime(thread)
        self._progress = progress
        self._step = step
        self._board = board
        self._rank, self._size = rank, size
        self._place = place
        self._least = least
        self._limit = limit
        self._directory = directory
        self._waits_on_device = waits_on_device
        self._clock = clock
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._last_check = self._quiet_since = self._idle_since = self._waits_since = clock()
        self._seen = progress()
        self._updates: deque[float] = deque(maxlen=_KEPT_UPDATES)
        self._is_first, self._stepped = True, step()
        self._begin_quiet()

    def _begin_quiet(self) -> None:
        """Forget what was said and noted of a time without progress."""
        self._noted_at: float | None = None
        self._raised = self._dumped = self._said = ""
        self._asked: tuple[float, dict[int, Standing | None]] | None = None

    def check(self) -> None:
        """Look once; called about once a second, by a thread of its own."""
        now = self._clock()
        gap, self._last_check = now - self._last_check, now
        if gap > _STOPPED_SECONDS:
            self._quiet_since, self._idle_since, self._waits_since = (
                self._quiet_since + gap,
                self._idle_since + gap,
                now,
            )
        progress = self._progress()
        if progress != self._seen:
            self._seen = progress
            self._go_on(now)
            return
        mine = self._standing()
        has_run = self._cpu.has_run(gap)
        if not mine.waits or (has_run and mine.collective != _DEVICE):
            self._waits_since = now
        if mine.excuse:
            self._idle_since = now
        self._judge(mine, now)

    def _judge(self, mine: Standing, now: float) -> None:
        """Tell the others what this rank does where it is quiet for long, and say what all do where it is too long."""
        warns, (ends, lead) = self._warning_after(), self._ending_after()
        if now - self._quiet_since <= min(warns, ends) / 2:
            return
        grace = min(_GRACE_SECONDS, lead / 4)
        alarm = self._tell(mine, now, grace / 2)
        if now - self._waits_since > ends:
            alarm = self._raise(LIMIT)
        elif now - self._idle_since > warns and not alarm:
            alarm = WARNING
        if alarm and self._said not in (alarm, LIMIT) and self._place < _SPEAKERS:
            self._look_around(now, alarm, grace)

    def _go_on(self, now: float) -> None:
        """Note that an update is done."""
        if not self._is_first:
            # The time of an evaluation or a save, with which the clock was set anew, is not in it.
            self._updates.append((now - self._idle_since) / max(self._step() - self._stepped, 1))
        self._is_first, self._stepped = False, self._step()
        self._quiet_since = self._idle_since = self._waits_since = now
        if self._noted_at is not None:
            self._board.write(f"standing/{self._rank}", "")
        if self._raised:
            self._board.write("alarm", "")
        self._begin_quiet()

    def _warning_after(self) -> float:
        """Return the seconds of an update after which it takes far longer than those before it."""
        if self._least is None or not self._updates:
            return math.inf
        return max(self._least, FAR_LONGER * max(self._updates))

    def _ending_after(self) -> tuple[float, float]:
        """Return the seconds in a collective after which there is just time enough to say what the ranks do, and how much that is."""
        limit = self._limit()
        if limit is None:
            return math.inf, math.inf
        lead = min(max(limit / 10, 5 * _GRACE_SECONDS), 60.0, limit / 2)
        return limit - lead, lead

    def _standing(self) -> Standing:
        frame = sys._current_frames().get(self._thread)
        part = self._reader.part_of(frame)
        waits = self._reader.activity(frame, self._sleeps) == "waiting"
        collective, called = collective_of(frame) if waits else ("", "")
        if self._waits_on_device and frame is not None and frame.f_code.co_name == "synchronize":
            waits, collective = True, _DEVICE
        return Standing(
            self._rank,
            self._host,
            self._pid,
            waits,
            collective,
            called,
            place_of(frame),
            stack_text(frame),
            excuse_of(frame) or (part if part in ("evaluating", "checkpointing") else ""),
            self._said,
            time.time(),
        )

    def _tell(self, mine: Standing, now: float, every: float) -> str:
        """Tell the others what this rank does, and write its stacks where one of them asks for that; return what it asks for."""
        if self._noted_at is None or now - self._noted_at >= every:
            self._note(mine, now)
        alarm, _, raised_at = (self._board.read("alarm") or "").partition(" ")
        if not alarm or not self._is_of_now(float(raised_at), now):
            alarm = ""
        if alarm and self._dumped != alarm:
            self._dumped = alarm
            # A sign of life first: on a busy machine the stacks may take longer than such signs are waited for.
            self._note(mine, now)
            self._dump(mine)
        return alarm

    def _note(self, mine: Standing, now: float) -> None:
        self._noted_at = now
        self._board.write(f"standing/{self._rank}", json.dumps(asdict(mine)))

    def _raise(self, alarm: str) -> str:
        if self._raised != alarm:
            self._raised = alarm
            self._board.write("alarm", f"{alarm} {time.time()}")
        return alarm

    def _is_of_now(self, moment: float, now: float) -> bool:
        """Whether something was noted since there was no progress: ranks that were started anew may find notes of those before them."""
        return time.time() - moment < now - self._quiet_since + _CLOCKS_APART_SECONDS

    def _dump(self, mine: Standing) -> None:
        file = self._directory() / f"step-{self._step():012d}-rank-{self._rank:05d}.txt"
        head = f"Rank {mine.rank}, process {mine.pid} on {mine.host}, after step {self._step()}: {described(mine)}\n\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, head + all_stacks())
        except OSError as error:
            logger.warning("The stacks of rank %d cannot be written: %s.", self._rank, error)

    def _look_around(self, now: float, alarm: str, grace: float) -> None:
        """Read twice what the ranks do, and say it: a note that does not change is that of a rank that gives no sign any more."""
        if self._asked is None:
            # Each speaker leaves those before it the time that they need.
            self._asked = now + 2 * grace * self._place, {}
        since, before = self._asked
        if now < since:
            return
        if not before:
            before.update(self._notes())
            if alarm == WARNING and self._is_excused(before, now):
                return
            if any(note is not None and note.said in (alarm, LIMIT) for note in before.values()):
                self._said = alarm
                return
            self._raise(alarm)
        if now < since + grace:
            return
        notes = self._notes()
        signs = {rank: note if note != before[rank] or rank == self._rank else None for rank, note in notes.items()}
        if None in signs.values() and now < since + 2 * grace:
            return  # on a busy machine the thread of a rank may get no turn for some seconds
        self._asked = None
        if alarm == WARNING and self._is_excused(signs, now):
            return
        self._said = alarm
        self._note(self._standing(), now)
        self._say(signs, notes, now, alarm)

    def _is_excused(self, notes: Mapping[int, Standing | None], now: float) -> bool:
        """Whether a rank does what may take any time; then as much time is given once more."""
        if not any(note is not None and note.excuse for note in notes.values()):
            return False
        self._idle_since, self._asked = now, None
        return True

    def _notes(self) -> dict[int, Standing | None]:
        notes = {rank: Standing.parsed(self._board.read(f"standing/{rank}")) for rank in range(self._size)}
        now = self._clock()
        return {r: note if note is not None and self._is_of_now(note.time, now) else None for r, note in notes.items()}

    def _say(
        self, signs: Mapping[int, Standing | None], notes: Mapping[int, Standing | None], now: float, alarm: str
    ) -> None:
        silent = {rank: self._fate(rank, notes[rank]) for rank, sign in signs.items() if sign is None}
        seconds, limit = now - self._quiet_since, self._limit()
        head = f"Update {self._step() + 1} has not come to its end in {seconds:.0f} s"
        if self._updates:
            head += f"; those before it took up to {max(self._updates):.2g} s"
        if alarm == LIMIT:
            head += f". A collective may take {limit:g} s, after which the job ends"
        else:
            head += ". comm.train_timeout_seconds sets after how long such a wait ends the job"
            head += f"; now it is {limit:g} s" if limit is not None else ""
        logger.warning("%s", report(head, signs, silent, self._directory()))

    def _fate(self, rank: int, note: Standing | None) -> str:
        host, _, process = (self._board.read(f"host/{rank}") or "").rpartition(" ")
        host, pid = (note.host, note.pid) if note is not None else (host, int(process) if process.isdigit() else 0)
        if not host:
            return "nothing is known of it"
        last = f", last {described(note)}" if note is not None else ""
        return f"process {pid} on {host}{last}{fate_of(pid) if host == self._host else ''}"

    def close(self) -> None:
        """Let go of the kernel's table."""
        self._sleeps.close()


class _CpuTime:
    """Tells whether a thread has run since the last question, from the time that it had on a processor."""

    def __init__(self, thread: int) -> None:
        try:
            self._clock: int | None = time.pthread_getcpuclockid(thread)
        except (AttributeError, OSError):
            self._clock = None
        self._last = self._read()

    def has_run(self, seconds: float) -> bool:
        """Return whether it ran for more than some thousandths of so many seconds; `False` where that is not known."""
        before, self._last = self._last, self._read()
        return self._last - before > 0.005 * seconds

    def _read(self) -> float:
        try:
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        except OSError:
            return 0.0


def fate_of(pid: int) -> str:
    """Return what became of a process of this machine."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
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


def described(standing: Standing) -> str:
    """Return what a rank does, in a few words."""
    if standing.waits:
        return f"waits in {_waited_in(standing)}"
    return f"at {standing.place}" + (f" ({standing.excuse})" if standing.excuse else "")


def _waited_in(standing: Standing) -> str:
    called = f", called at {standing.called}" if standing.called else ""
    return f"{standing.collective or 'communication'}{called}"


def report(head: str, signs: Mapping[int, Standing | None], silent: Mapping[int, str], directory: Path) -> str:
    """Return what is said of a training that stands still: the stacks, then who waits, and last who they wait for."""
    there = {rank: sign for rank, sign in signs.items() if sign is not None}
    lines = [f"{head}. The stacks of all threads are in {directory}."]
    for stack, ranks in _alike(there, lambda sign: sign.stack):
        lines += [f"{_named(ranks, there)} (most recent call last):", stack.rstrip()]
    waiting = _alike({r: s for r, s in there.items() if s.waits}, lambda sign: f"{sign.collective}\n{sign.called}")
    # Those whose collective most are in are waiting for the others.
    waiting.sort(key=lambda found: -len(found[1]))
    for _, ranks in waiting:
        lines.append(f"{_named(ranks, there)} wait{'s' if len(ranks) == 1 else ''} in {_waited_in(there[ranks[0]])}.")
    busy = _alike({r: s for r, s in there.items() if not s.waits}, lambda sign: sign.place)
    elsewhere = f"{'is' if not waiting else 'is not in it, but'} "
    for _, ranks in busy:
        verb = elsewhere if len(ranks) == 1 else elsewhere.replace("is", "are", 1)
        lines.append(f"{_named(ranks, there)} {verb}{described(there[ranks[0]])}.")
    lines += [f"Rank {rank} gives no sign: {fate}." for rank, fate in silent.items()]
    return "\n".join(lines)


def _alike(there: Mapping[int, Standing], key: Callable[[Standing], str]) -> list[tuple[str, list[int]]]:
    """Return ranks in groups that are alike, each with what is alike."""
    found: dict[str, list[int]] = {}
    for rank, sign in there.items():
        found.setdefault(key(sign), []).append(rank)
    return list(found.items())


def _named(ranks: list[int], there: Mapping[int, Standing]) -> str:
    hosts = sorted({there[rank].host for rank in ranks})
    on = f" on {hosts[0]}" if len(hosts) == 1 else ""
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {spans(ranks)}{on}"


def spans(ranks: list[int]) -> str:
    """Return numbers in short: `0-2, 5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    short = (f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
    return ", ".join(short)
