"""What is said of a training that stands still, by itself: several ranks in one process, whose clocks are turned by hand."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.supervision.hangs import (
    BACKWARD,
    HangWatch,
    RankState,
    collective_of,
    excuse_of,
    fate_of,
    place_of,
    report,
    spans,
)
from danling.supervision.rank_watch import WatchedThread

TORCH = Path(torch.__file__).parent

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel has no table of threads")


class Notes(dict[str, str]):
    """Notes of ranks that live in one process."""

    def write(self, key: str, text: str) -> None:
        self[key] = text

    def read(self, key: str) -> str | None:
        return self.get(key)


def defined(file: str, source: str, **names: Any) -> Any:
    exec(compile(source, file, "exec"), names)
    return names["go"]


def in_collective(end: threading.Event) -> None:
    source = "def all_reduce(end): end.wait()\ngo = all_reduce"
    defined(str(TORCH / "distributed" / "c10d.py"), source)(end)


def lost_in_thought(end: threading.Event) -> None:
    defined("/home/me/train.py", "def go(end): end.wait()")(end)


class Rank:
    """A rank: a thread that stands still, and what watches it."""

    def __init__(self, job: Job, rank: int, doing: Any) -> None:
        self.end, self.global_step, self.skipped_updates, self.job = threading.Event(), 0, 0, job
        self.thread = threading.Thread(target=doing, args=(self.end,), daemon=True)
        self.thread.start()
        runner: Any = SimpleNamespace(
            state=SimpleNamespace(train=self),
            placement=SimpleNamespace(optimizer=SimpleNamespace(rank=rank, size=len(job.doing))),
            config=SimpleNamespace(comm=SimpleNamespace(hang_warning_seconds=job.least)),
            workspace=SimpleNamespace(dir=job.directory.parent),
            device=torch.device("cpu"),
        )
        self.watched = WatchedThread(self.thread)
        notes: Any = job.notes
        self.watch = HangWatch(runner, self.watched, notes, part=lambda: "computing", clock=lambda: job.now)
        self.watch.limit = lambda: None


class Job:
    """Ranks that stand still together, each in a function."""

    def __init__(self, directory: Path, *doing: Any, least: float = 20.0) -> None:
        self.directory, self.doing, self.least = directory, doing, least
        self.now, self.notes = 0.0, Notes()
        self.silent: set[int] = set()
        self.ranks = [Rank(self, rank, function) for rank, function in enumerate(doing)]
        self.seconds(1.0)
        # A thread that was just started may still run.
        time.sleep(0.05)

    def updates(self, number: int, seconds: float) -> None:
        for _ in range(number):
            for rank in self.ranks:
                rank.global_step += 1
            self.seconds(seconds)

    def seconds(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for number, rank in enumerate(self.ranks):
                if number not in self.silent:
                    rank.watch.check()

    def close(self) -> None:
        for rank in self.ranks:
            rank.end.set()
            rank.thread.join()
            rank.watched.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(*doing: Any, **settings: Any) -> Job:
        made.append(Job(tmp_path / "hangs", *doing, **settings))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "danling")
    return caplog


@pytest.mark.parametrize("least", [20.0, 21.0])
def test_a_rank_that_is_long_in_writing_its_stacks_is_not_taken_for_one_that_gives_no_sign(
    least: float, jobs: Any, said: pytest.LogCaptureFixture
) -> None:
    job = jobs(in_collective, in_collective, lost_in_thought, least=least)
    job.updates(3, 1.0)
    while not job.notes.get("alarm"):
        job.seconds(1)
    job.seconds(1)
    assert len(list(job.directory.glob("*.txt"))) == 3
    job.silent = {1}
    job.seconds(60)
    (record,) = said.records
    assert "gives no sign" not in record.getMessage() and "Ranks 0, 1 on" in record.getMessage()


def test_a_process_that_was_stopped_with_its_clock_is_no_hang(jobs: Any, said: pytest.LogCaptureFixture) -> None:
    job = jobs(in_collective, lost_in_thought)
    job.updates(3, 1.0)
    job.now += 10_000
    job.seconds(15)
    assert not said.records


def becomes(pid: int, fate: str) -> None:
    end = time.monotonic() + 20
    while fate not in fate_of(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_fate_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    becomes(child.pid, "busy in code that leaves other threads no turn; `py-spy dump --pid")
    child.send_signal(signal.SIGSTOP)
    becomes(child.pid, "stopped")
    child.kill()
    becomes(child.pid, "no more")
    child.wait()
    assert fate_of(child.pid) == ", which is no more"


def state(rank: int, **more: Any) -> RankState:
    given = {"host": "a", "pid": 1, "waits": True, "collective": "all_reduce", "called": "x", "place": "", "stack": "s"}
    return RankState(**{"rank": rank, **given, "excuse": "", "said": "", "time": 0.0, **more})


def test_the_collective_that_most_are_in_is_the_one_that_they_share() -> None:
    signs = {rank: state(rank) for rank in range(6)}
    signs[4] = state(4, collective="barrier", called="user.py:3 in f", host="b", stack="t")
    lines = report("Head", signs, {}, Path("/run/hangs")).splitlines()
    assert lines[0] == "Head. The stacks of all threads are in /run/hangs."
    assert lines[1:5] == [
        "Ranks 0-3, 5 on a (most recent call last):",
        "s",
        "Rank 4 on b (most recent call last):",
        "t",
    ]
    assert lines[5:] == [
        "Ranks 0-3, 5 on a wait in all_reduce, called at x.",
        "Rank 4 on b waits in barrier, called at user.py:3 in f.",
    ]
    busy = report("Head", {0: state(0, waits=False, place="p"), 1: state(1, waits=False, place="p")}, {}, Path("d"))
    assert busy.endswith("Ranks 0, 1 on a are at p.")
    assert spans([0, 1, 2, 4, 5, 9]) == "0-2, 4, 5, 9" and spans([]) == ""


def frame_in(*files: str) -> Any:
    """Return the innermost frame of functions that stand in files, the outermost first."""
    inner: Any = sys._getframe
    for number, file in enumerate(reversed(files)):
        source = f"def step_{number}(): return inner()"
        names: dict[str, Any] = {"inner": inner}
        exec(compile(source, file, "exec"), names)
        inner = names[f"step_{number}"]
    return inner()


def test_stacks_are_read_as_people_do() -> None:
    dist, danling = str(TORCH / "distributed"), str(Path(sys.modules["danling"].__file__ or "").parent)
    at = frame_in(
        "train.py", f"{danling}/distributed/domain.py", f"{dist}/c10d_logger.py", f"{dist}/distributed_c10d.py"
    )
    assert collective_of(at)[0] == "step_0" and collective_of(at)[1].startswith("train.py:1 in step_3")
    assert collective_of(frame_in("train.py", threading.__file__)) == ("", "")
    waits_in_store = collective_of(frame_in("train.py", f"{danling}/distributed/meeting.py"))
    assert waits_in_store[0] == "step_0" and waits_in_store[1].startswith("train.py")
    backward = {"inner": sys._getframe}
    exec(compile("def _engine_run_backward(): return inner()", str(TORCH / "autograd" / "graph.py"), "exec"), backward)
    assert collective_of(backward["_engine_run_backward"]())[0] == BACKWARD
    assert place_of(frame_in("train.py", str(TORCH / "nn" / "functional.py"))) == "train.py:1 in step_1, in step_0"
    waiting: dict[str, Any] = {"inner": sys._getframe}
    exec(
        compile("def _try_get_data(): return inner()", str(TORCH / "utils" / "data" / "dataloader.py"), "exec"), waiting
    )
    names = {"inner": waiting["_try_get_data"]}
    exec(compile("def step(): return inner()", "train.py", "exec"), names)
    assert place_of(names["step"]()) == "train.py:1 in step, waiting for a worker of its data loader"
    fsdp = frame_in("train.py", f"{dist}/fsdp/_fully_shard/_fsdp_common.py", f"{dist}/distributed_c10d.py")
    assert collective_of(fsdp)[0] == "step_0" and collective_of(fsdp)[1].startswith("train.py")
    assert place_of(None) == "nowhere" and excuse_of(frame_in("train.py")) == ""
    for file, excuse in (
        (str(TORCH / "_dynamo" / "convert_frame.py"), "compiling"),
        ("/usr/lib/python3.11/pdb.py", "in a debugger"),
        (f"{danling}/stream/loader.py", "waiting for a stream"),
        (f"{danling}/torchft/groups.py", "waiting for other replica groups"),
    ):
        assert excuse_of(frame_in("train.py", file, threading.__file__)) == excuse
    # Compiled code that runs is no compilation.
    assert excuse_of(frame_in("train.py", str(TORCH / "_dynamo" / "eval_frame.py"))) == ""
