"""The parts of a report of hung training by themselves: the fate of a process, stacks as people read them, and the text."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from danling.supervision.hangs import (
    BACKWARD,
    RankState,
    collective_of,
    excuse_of,
    fate_of,
    place_of,
    report,
    spans,
)

TORCH = Path(torch.__file__).parent

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel has no table of threads")


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
