"""Detects hung training, and reports which ranks wait for which, and where the rank is that they wait for.

A thread of each rank checks, since the thread that trains may be stuck where no Python runs. The ranks leave notes for each other, without
a collective.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from danling.distributed import collective_timeout
from danling.utils.files import write_atomically

if TYPE_CHECKING:
    from danling.distributed import Board
    from danling.runners.torch_runner import TorchRunner

    from .rank_watch import WatchedThread


logger = logging.getLogger("danling")

FAR_LONGER = 10
"""How many times longer than the longest update of late one takes that is taken for a hang."""

_KEPT_UPDATES = 256
_GRACE_SECONDS = 3.0
"""How long the notes of other ranks may take."""

_SPEAKERS = 8
"""Ranks that may report, each only if those before it do not: each of them asks the store for the notes of all."""

_CLOCKS_APART_SECONDS = 10.0
"""By how much the clocks of machines may differ."""

_DEVICE = "work of the device"

_STOPPED_SECONDS = 5.0
"""A look that comes so late says that this process was stopped, or its machine asleep."""

WARNING, LIMIT = "warning", "limit"
"""The two alarms: an update takes far longer than others, and the time limit of a collective is near."""


TORCH = str(Path(torch.__file__).parent) + os.sep
DANLING = str(Path(__file__).parents[1]) + os.sep
_COLLECTIVES = f"{TORCH}distributed{os.sep}"
_CALLED_BY_NAME = f"{_COLLECTIVES}distributed_c10d.py"
"""Where the collectives are that people know by their names."""
_DOMAINS = f"{DANLING}distributed{os.sep}"
_OWN_CALLS = f"{DANLING}audit{os.sep}layout_record.py"
"""Intercepts a program's calls of torch, in a check of layouts."""
STANDARD = str(Path(os.__file__).parent) + os.sep
_MOST_FRAMES = 40

BACKWARD = "the reduction of gradients at the end of a backward"

_EXCUSES = {
    "in a debugger": (f"{os.sep}pdb.py", f"{os.sep}bdb.py", "debugpy", "pydevd"),
    "compiling": (
        os.path.join("_dynamo", "convert_frame.py"),
        os.path.join("_inductor", "compile_fx.py"),
        os.path.join("_inductor", "async_compile.py"),
        os.path.join("triton", "compiler") + os.sep,
    ),
    "waiting for a stream": (f"{DANLING}stream{os.sep}",),
    "waiting for other replica groups": (f"{DANLING}torchft{os.sep}", f"{os.sep}torchft{os.sep}"),
}
"""Activities that may take any time, with parts of the paths of their source files."""


@dataclass(frozen=True)
class RankState:
    """What a rank does while no update ends: whether it sleeps within communication, in which collective and where that was called, where
    it is and its stack, why this may take any time, the alarm that it has raised (`""`, `WARNING` or `LIMIT`), and when it noted this.
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


class HangWatch:
    """Reports once what the ranks do where an update takes far longer than others, and before the time limit of a collective ends the job.

    Args:
        runner: The runner that trains.
        thread: The thread that trains.
        board: Where the ranks leave notes for each other.
        part: Returns the part of the training that is under way.
    """

    def __init__(self, runner: TorchRunner, thread: WatchedThread, board: Board, *, part: Callable[[], str]) -> None:
        self._thread, self._board, self._part = thread, board, part
        self._cpu = _CpuTime(thread.ident)
        self._train = runner.state.train
        domain = runner.placement.optimizer
        self._rank, self._size = domain.rank, domain.size
        self._least = runner.config.comm.hang_warning_seconds
        self._directory = runner.workspace.dir / "hangs"
        self._device = runner.device
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._last_check = self._quiet_since = self._idle_since = self._waits_since = time.monotonic()
        self._seen = self._progress()
        self._updates: deque[float] = deque(maxlen=_KEPT_UPDATES)
        self._is_first, self._stepped = True, self._train.global_step
        self._begin_quiet()

    def _progress(self) -> tuple[int, int]:
        return self._train.global_step, self._train.skipped_updates

    def _begin_quiet(self) -> None:
        """Forget what was said and noted of a time without progress."""
        self._noted_at: float | None = None
        self._raised = self._dumped = self._said = ""
        self._asked: tuple[float, dict[int, RankState | None]] | None = None

    def check(self) -> None:
        """Look once; called about once a second, by its own thread."""
        now = time.monotonic()
        gap, self._last_check = now - self._last_check, now
        if gap > _STOPPED_SECONDS:
            self._quiet_since, self._idle_since = self._quiet_since + gap, self._idle_since + gap
            self._waits_since = now
        progress = self._progress()
        if progress != self._seen:
            self._seen = progress
            self._go_on(now)
            return
        mine = self._state()
        has_run = self._cpu.has_run(gap)
        if not mine.waits or (has_run and mine.collective != _DEVICE):
            self._waits_since = now
        if mine.excuse:
            self._idle_since = now
        self._judge(mine, now)

    def _judge(self, mine: RankState, now: float) -> None:
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
        if alarm and self._said not in (alarm, LIMIT) and self._rank < _SPEAKERS:
            self._look_around(now, alarm, grace)

    def _go_on(self, now: float) -> None:
        """Note that an update is done."""
        if not self._is_first:
            # The time of an evaluation or a save, with which the clock was set anew, is not in it.
            self._updates.append((now - self._idle_since) / max(self._train.global_step - self._stepped, 1))
        self._is_first, self._stepped = False, self._train.global_step
        self._quiet_since = self._idle_since = self._waits_since = now
        if self._noted_at is not None:
            self._board.write(f"state/{self._rank}", "")
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
        limit = collective_timeout(self._device)
        if limit is None:
            return math.inf, math.inf
        lead = min(max(limit / 10, 5 * _GRACE_SECONDS), 60.0, limit / 2)
        return limit - lead, lead

    def _state(self) -> RankState:
        frame, part = self._thread.frame(), self._part()
        waits = part != "data" and self._thread.waits(frame)
        collective, called = collective_of(frame) if waits else ("", "")
        if self._device.type != "cpu" and frame is not None and frame.f_code.co_name == "synchronize":
            waits, collective = True, _DEVICE
        excuse = excuse_of(frame) or (part if part in ("evaluating", "checkpointing") else "")
        place, stack = place_of(frame), stack_text(frame)
        return RankState(
            self._rank,
            self._host,
            self._pid,
            waits,
            collective,
            called,
            place,
            stack,
            excuse,
            self._said,
            time.time(),
        )

    def _tell(self, mine: RankState, now: float, every: float) -> str:
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

    def _note(self, mine: RankState, now: float) -> None:
        self._noted_at = now
        self._board.write(f"state/{self._rank}", json.dumps(asdict(mine)))

    def _raise(self, alarm: str) -> str:
        if self._raised != alarm:
            self._raised = alarm
            self._board.write("alarm", f"{alarm} {time.time()}")
        return alarm

    def _is_of_now(self, moment: float, now: float) -> bool:
        """Whether something was noted since there was no progress: ranks that were started anew may find notes of those before them."""
        return time.time() - moment < now - self._quiet_since + _CLOCKS_APART_SECONDS

    def _dump(self, mine: RankState) -> None:
        file = self._directory / f"step-{self._train.global_step:012d}-rank-{self._rank:05d}.txt"
        head = f"Rank {mine.rank}, process {mine.pid} on {mine.host}, after step {self._train.global_step}: {described(mine)}\n\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, head + all_stacks())
        except OSError as error:
            logger.warning("The stacks of rank %d cannot be written: %s.", self._rank, error)

    def _look_around(self, now: float, alarm: str, grace: float) -> None:
        """Read twice what the ranks do, and say it: a note that does not change is that of a rank that gives no sign any more."""
        if self._asked is None:
            # Each speaker leaves those before it the time that they need.
            self._asked = now + 2 * grace * self._rank, {}
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
        self._note(self._state(), now)
        self._say(signs, notes, now, alarm)

    def _is_excused(self, notes: Mapping[int, RankState | None], now: float) -> bool:
        """Whether a rank does what may take any time; then as much time is given once more."""
        if not any(note is not None and note.excuse for note in notes.values()):
            return False
        self._idle_since, self._asked = now, None
        return True

    def _notes(self) -> dict[int, RankState | None]:
        """Return what each rank has noted; `None` for one that has not, has taken it back, or did before there was no progress."""
        notes: dict[int, RankState | None] = {}
        for rank in range(self._size):
            text = self._board.read(f"state/{rank}")
            note = RankState(**json.loads(text)) if text else None
            notes[rank] = note if note is not None and self._is_of_now(note.time, time.monotonic()) else None
        return notes

    def _say(
        self, signs: Mapping[int, RankState | None], notes: Mapping[int, RankState | None], now: float, alarm: str
    ) -> None:
        silent = {rank: self._fate(rank, notes[rank]) for rank, sign in signs.items() if sign is None}
        seconds, limit = now - self._quiet_since, collective_timeout(self._device)
        head = f"Update {self._train.global_step + 1} has not come to its end in {seconds:.0f} s"
        if self._updates:
            head += f"; those before it took up to {max(self._updates):.2g} s"
        if alarm == LIMIT:
            head += f". A collective may take {limit:g} s, after which the job ends"
        else:
            head += ". comm.train_timeout_seconds sets after how long such a wait ends the job"
            head += f"; now it is {limit:g} s" if limit is not None else ""
        logger.warning("%s", report(head, signs, silent, self._directory))

    def _fate(self, rank: int, note: RankState | None) -> str:
        host, _, process = (self._board.read(f"host/{rank}") or "").rpartition(" ")
        host, pid = (note.host, note.pid) if note is not None else (host, int(process) if process.isdigit() else 0)
        if not host:
            return "nothing is known of it"
        last = f", last {described(note)}" if note is not None else ""
        return f"process {pid} on {host}{last}{fate_of(pid) if host == self._host else ''}"


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


def described(state: RankState) -> str:
    """Return what a rank does, in a few words."""
    if state.waits:
        return f"waits in {state.collective or 'communication'}" + (
            f", called at {state.called}" if state.called else ""
        )
    return f"at {state.place}" + (f" ({state.excuse})" if state.excuse else "")


def report(head: str, signs: Mapping[int, RankState | None], silent: Mapping[int, str], directory: Path) -> str:
    """Return the report: the stacks, then the ranks that wait, and last those that they wait for."""
    there = {rank: sign for rank, sign in signs.items() if sign is not None}
    lines = [f"{head}. The stacks of all threads are in {directory}."]
    for stack, ranks in _alike(there, lambda sign: sign.stack):
        lines += [f"{_named(ranks, there)} (most recent call last):", stack.rstrip()]
    waiting = _alike({r: s for r, s in there.items() if s.waits}, lambda sign: f"{sign.collective}\n{sign.called}")
    # Those whose collective most are in are waiting for the others.
    waiting.sort(key=lambda found: -len(found[1]))
    for _, ranks in waiting:
        waits = described(there[ranks[0]])
        lines.append(f"{_named(ranks, there)} {waits if len(ranks) == 1 else waits.replace('waits', 'wait', 1)}.")
    busy = _alike({r: s for r, s in there.items() if not s.waits}, lambda sign: sign.place)
    elsewhere = f"{'is' if not waiting else 'is not in it, but'} "
    for _, ranks in busy:
        verb = elsewhere if len(ranks) == 1 else elsewhere.replace("is", "are", 1)
        lines.append(f"{_named(ranks, there)} {verb}{described(there[ranks[0]])}.")
    lines += [f"Rank {rank} gives no sign: {fate}." for rank, fate in silent.items()]
    return "\n".join(lines)


def _alike(there: Mapping[int, RankState], key: Callable[[RankState], str]) -> list[tuple[str, list[int]]]:
    """Return groups of ranks that have the same key, each with this key."""
    found: dict[str, list[int]] = {}
    for rank, sign in there.items():
        found.setdefault(key(sign), []).append(rank)
    return list(found.items())


def _named(ranks: list[int], there: Mapping[int, RankState]) -> str:
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


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def excuse_of(frame: FrameType | None) -> str:
    """Return why what a thread does may take any time; an empty text where nothing says so."""
    files = {found.f_code.co_filename for found in frames_of(frame)}
    return next((name for name, parts in _EXCUSES.items() if any(part in file for part in parts for file in files)), "")


def collective_of(frame: FrameType | None) -> tuple[str, str]:
    """Return the collective that a thread waits in and where it was called; two empty texts where it is in none."""
    name = ""
    for found in frames_of(frame):
        code = found.f_code
        if code.co_filename == _CALLED_BY_NAME or (not name and code.co_filename.startswith(_COLLECTIVES)):
            name = name if code.co_name == "wrapper" else code.co_name
        elif code.co_filename.startswith(_COLLECTIVES):
            continue
        elif code.co_name == "_engine_run_backward":
            name = name or BACKWARD
        elif code.co_filename.startswith(_DOMAINS):
            name = name or code.co_name
        elif name and not code.co_filename.startswith(TORCH) and code.co_filename != _OWN_CALLS:
            return name, spot(found)
        elif not name and not _is_between(code.co_filename):
            return "", ""
    return name, ""


def _is_between(file: str) -> bool:
    return file.startswith((TORCH, STANDARD)) and "-packages" not in file.removeprefix(TORCH)


def place_of(frame: FrameType | None) -> str:
    """Return where a thread is: in the innermost function that is of no library, else in the innermost one."""
    found = list(frames_of(frame))
    own = [one for one in found if not one.f_code.co_filename.startswith((STANDARD, TORCH, DANLING, "<"))]
    own = [one for one in own if "-packages" not in one.f_code.co_filename]
    if not own:
        return spot(found[0]) if found else "nowhere"
    inner = "" if own[0] is found[0] else f", in {found[0].f_code.co_name}"
    if any(one.f_code.co_name == "_try_get_data" for one in found):
        inner = ", waiting for a worker of its data loader"
    return f"{spot(own[0])}{inner}"


def spot(frame: FrameType) -> str:
    """Return file, line and function of a frame, and its source line."""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f" ({text})" if text else "")


def stack_text(frame: FrameType | None) -> str:
    """Return a stack as Python prints it, the innermost frame last; of a long one the innermost frames."""
    return "".join(traceback.format_stack(frame, _MOST_FRAMES)) if frame is not None else ""


def all_stacks() -> str:
    """Return the stacks of all threads of this process but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            found.append(f"Thread {names.get(thread, thread)} (most recent call last):\n{stack_text(frame)}")
    return "\n".join(found)
