"""Random faults of elastic ranks: at points of the program, at statements of the library, and from outside at any instant.

Ranks that have the state of the run are listed in a directory, ALIVE. Whoever ends one holds its lock and leaves another one, so that a
storm may go on for as long as the training does. With STORM_ALONE, the next fault waits until the others have made an update without the
rank of the last one: two ranks that end at once may have all there is of a part of the state.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .plain_loop import note

POINTS = ("update", "leaf", "reduced", "stepped", "evaluating", "save", "saved")
HOW = ("kill", "kill", "kill", "stop", "exit", "raise", "leave")
_SHARD_POINTS = (
    "vote",
    "in_vote",
    "vote_done",
    "weights",
    "in_weights",
    "weights_done",
    "exchange",
    "exchange_done",
)
_RARE = ("evaluating", "save", "saved", "exchange", "exchange_done")
_RAISING = ("update", "leaf", "reduced", "stepped", "evaluating")
"""Where the program itself runs on each rank; a save on the main process fails on all ranks."""

STATEMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "form": (
        300,
        (
            "elastic/attach.py",
            "elastic/domain.py",
            "elastic/handover.py",
            "elastic/main_process.py",
            "elastic/member.py",
            "elastic/reconfigure.py",
            "elastic/metrics_file.py",
        ),
    ),
    "update": (
        1500,
        (
            "training/update.py",
            "training/finite_updates.py",
            "training/window.py",
            "training/canonical_sum.py",
            "distributed/step_sync.py",
            "training/loop.py",
            "training/due_work.py",
            "training/pass_agreement.py",
        ),
    ),
    "evaluation": (400, ("training/evaluation.py", "training/results.py")),
    "save": (
        600,
        (
            "training/saving.py",
            "checkpoints/manager.py",
            "checkpoints/directory.py",
            "checkpoints/file_store.py",
            "checkpoints/torch_files.py",
        ),
    ),
    "main": (
        300,
        (
            "workspace/run_directory.py",
            "reporting/jsonl.py",
            "reporting/trackers.py",
            "reporting/reporter.py",
            "elastic/metrics_file.py",
        ),
    ),
}
"""Statements of one room: so many of them are about two passes through it, in these files."""
_SHARDS = (400, ("elastic/shards.py",))
_LOCK, _OPEN = "lock", "open"


class Roll:
    """The ranks that have the state, as files of a directory whose names are their numbers and whose text is the process."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True, parents=True)

    @contextmanager
    def locked(self) -> Iterator[dict[int, int]]:
        """Hold the lock, and yield the processes by number."""
        with open(self.directory / _LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            listed = {
                int(each.name): int(each.read_text())
                for each in self.directory.iterdir()
                if each.name.isdigit()
            }
            yield {number: pid for number, pid in listed.items() if _is_running(pid)}

    def enter(self, number: int) -> None:
        """List this process."""
        with self.locked():
            (self.directory / str(number)).write_text(str(os.getpid()))

    def remove(self, number: int) -> None:
        """Forget a process that is struck; the caller holds the lock."""
        (self.directory / str(number)).unlink(missing_ok=True)
        (self.directory / _OPEN).write_text(str(number))

    @property
    def struck(self) -> int | None:
        """The rank that was struck last, until `close`; the caller holds the lock."""
        file = self.directory / _OPEN
        return int(file.read_text()) if file.exists() else None

    def close(self, is_over: Callable[[int], bool]) -> None:
        """End the last fault, if it is over for the rank that was struck."""
        with self.locked():
            if self.struck is not None and is_over(self.struck):
                (self.directory / _OPEN).unlink()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Storm:
    """The faults of one rank, in the place of `plain_loop.Faults`."""

    def __init__(self, number: int, *, has_shards: bool = False) -> None:
        self._number = number
        self._alone = "STORM_ALONE" in os.environ
        self._points = (*POINTS, *_SHARD_POINTS) if has_shards else POINTS
        self._rooms = {**STATEMENTS, "shards": _SHARDS} if has_shards else STATEMENTS
        self._choices = random.Random(f"{os.environ['STORM']}/{number}")
        self._roll = Roll(os.environ["ALIVE"])
        self._updates = 0
        self._is_listed = False
        self._waits = 0
        self._where, self._how, self._left = "", "", 0
        self._files: tuple[str, ...] = ()
        self._codes: dict[CodeType, bool] = {}

    def at(self, point: str) -> None:
        """Come to a point of the program."""
        if point == "stepped":
            self._stepped()
        if point == "born":
            if self._choices.random() < 0.1 and os.environ.get("DANLING_ELASTIC_JOINS") == "1":
                note(struck=time.time(), how="kill", where="born", number=self._number)
                os.kill(os.getpid(), signal.SIGKILL)
        elif point == self._where:
            self._left -= 1
            if self._left <= 0:
                self._strike(point)

    def has_state(self) -> None:
        """This rank has taken over the state of the run."""
        if not self._is_listed:
            self._is_listed = True
            self._roll.enter(self._number)

    def made_update(self, members: Collection[int]) -> None:
        """These ranks have made an update after a change."""
        self._roll.close(lambda struck: struck not in members)

    def _stepped(self) -> None:
        self._updates += 1
        if self._updates == 2:
            # From here on all ranks train.
            self.has_state()
        if self._waits and self._updates >= self._waits:
            # It was stopped and continued, and is certainly not killed for that any more.
            self._waits, self._is_listed = 0, False
            self._roll.close(lambda struck: struck == self._number)
            self.has_state()
        if (
            not self._where
            and self._is_listed
            and self._choices.random() < float(os.environ.get("STORM_RATE", "0.05"))
        ):
            self._arm()

    def _arm(self) -> None:
        self._how = self._choices.choice(HOW)
        if self._choices.random() < 0.3:
            self._where = self._choices.choice(self._points)
            self._left = self._choices.randint(1, 2 if self._where in _RARE else 10)
            if self._how in ("raise", "leave") and self._where not in _RAISING:
                self._how = "kill"
            return
        room = self._choices.choice(list(self._rooms))
        most, files = self._rooms[room]
        self._where, self._left = f"statement of {room}", self._choices.randint(1, most)
        self._how = self._choices.choice(("kill", "kill", "stop", "exit"))
        self._files = files
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, value: object) -> Callable[..., Any] | None:
        code = frame.f_code
        found = self._codes.get(code)
        if found is None:
            found = self._codes[code] = (
                code.co_filename.endswith(self._files) and "danling" in code.co_filename
            )
        return self._line if found else None

    def _line(self, frame: FrameType, event: str, value: object) -> Callable[..., Any] | None:
        if event == "line":
            self._left -= 1
            if self._left <= 0:
                where = f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                frame.f_trace = None
                self._strike(where)
                return None
        return self._line

    def _strike(self, where: str) -> None:
        how, self._where = self._how, ""
        self._codes.clear()
        with self._roll.locked() as listed:
            if not any(number != self._number for number in listed) or self._number not in listed:
                return  # the last one that has the state
            if self._alone and self._roll.struck is not None:
                return
            self._roll.remove(self._number)
            if how != "stop":
                note(struck=time.time(), how=how, where=where, number=self._number)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(0)
        if how == "stop":
            self._waits = self._updates + 10
            note(struck=time.time(), how="stop", where=where, number=self._number)
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "leave":
            sys.exit(3)
        if how == "raise":
            raise ZeroDivisionError("a fault of the test")


class Gusts:
    """Faults from outside: some ranks at once, or a replacement at its birth, at any instant."""

    def __init__(
        self, seed: str, directory: str, report: Path, *, mean_seconds: float, alone: bool = False
    ) -> None:
        self._choices, self._alone = random.Random(seed), alone
        self._roll, self._report, self._mean = Roll(directory), report, mean_seconds
        self._next = time.monotonic() + 1.0
        self._seen: set[int] = set()
        self._dying: list[tuple[float, BaseProcess]] = []

    def __call__(self, living: Collection[BaseProcess], replacements: Collection[int]) -> None:
        """Strike where it is time to; the supervision calls it again and again."""
        now = time.monotonic()
        self._strike_at_birth(living, replacements, now)
        if now < self._next:
            return
        self._next = now + self._choices.expovariate(1 / self._mean)
        with self._roll.locked() as listed:
            by_pid = {process.pid: process for process in living}
            there = sorted(number for number, pid in listed.items() if pid in by_pid)
            if len(there) < 2 or (self._alone and self._roll.struck is not None):
                return
            count = (
                1
                if self._alone
                else min(self._choices.choice((1, 1, 2, len(there) - 1)), len(there) - 1)
            )
            for number in self._choices.sample(there, count):
                self._roll.remove(number)
                self._strike(by_pid[listed[number]], number, f"instant, {count} of {len(there)}")

    def _strike_at_birth(
        self, living: Collection[BaseProcess], replacements: Collection[int], now: float
    ) -> None:
        for process in living:
            assert process.pid is not None
            if process.pid in replacements and process.pid not in self._seen:
                self._seen.add(process.pid)
                if self._choices.random() < 0.1:
                    self._dying.append((now + self._choices.uniform(0, 0.4), process))
        for entry in [each for each in self._dying if now >= each[0]]:
            self._dying.remove(entry)
            with self._roll.locked() as listed:
                if entry[1].is_alive() and entry[1].pid not in listed.values():
                    self._strike(entry[1], -1, "birth")

    def _strike(self, process: BaseProcess, number: int, where: str) -> None:
        with self._report.open("a") as file:
            file.write(
                json.dumps({"struck": time.time(), "how": "kill", "where": where, "number": number})
                + "\n"
            )
        process.kill()
