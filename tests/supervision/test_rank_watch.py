"""The watch of a rank by itself: what it sees by the events of a training, stacks as people read them, and the text of a report."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import until
from support.processes import fork, wait

from danling.config import RunnerConfig
from danling.runners.state import TrainState
from danling.supervision import RankWatch
from danling.supervision.rank_watch import RankState, fate_of, report
from danling.supervision.stacks import WatchedThread, collective_of, excuse_of, location_of

TORCH = Path(torch.__file__).parent

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the kernel has no table of threads"
)


def watched(directory: Path, seconds: float = 0.001, **more: Any) -> RankWatch:
    domain = SimpleNamespace(rank=0, size=2, gather_objects=lambda mine: [mine, ("other", 12)])
    runner: Any = SimpleNamespace(
        config=RunnerConfig({"steps": 4}),
        placement=SimpleNamespace(optimizer=domain),
        state=SimpleNamespace(train=TrainState()),
        device=torch.device("cpu"),
        workspace=SimpleNamespace(dir=directory),
    )
    session: Any = SimpleNamespace(training=3, running=True)
    reporter: Any = SimpleNamespace(rank_times=None)
    return RankWatch(runner, session, reporter, None, seconds=seconds, **more)


def test_events_tell_the_current_phase_of_a_training(tmp_path: Path) -> None:
    now = iter(range(100))
    watch = watched(tmp_path, clock=lambda: float(next(now)))
    assert watch.look() == "computing"
    watch.batch_wait_started()
    assert watch.look() == "data"
    watch.batch_wait_ended()
    watch.evaluation_started("val")
    assert watch.look() == "evaluating"
    watch.save_started()
    assert watch.look() == "checkpointing"
    watch.save_ended()
    watch.evaluation_ended("val")
    assert watch.look() == "computing"
    watch._session.running = False  # what is written at the end may take any time
    assert watch.look() == "checkpointing"
    assert watch.take() == ([1.0, 2.0, 0.0, 2.0, 1.0], 6) and watch.take()[1] == 0


def test_looks_add_up_until_the_end_also_after_a_fork(tmp_path: Path) -> None:
    watch = watched(tmp_path)
    watch.training_started()
    assert watch._reporter.rank_times is not None and watch.hosts[1] == ("other", 12)
    until(lambda: watch.take()[1] > 2)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            logging.getLogger("danling").debug("a worker speaks")
            os._exit(
                7 if [t for t in threading.enumerate() if t.name == "danling-rank-watch"] else 0
            )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watch.training_ended()
    watch.training_ended()
    assert watch._reporter.rank_times is None
    assert not [thread for thread in threading.enumerate() if thread.name == "danling-rank-watch"]


def _watch_a_backward(sleeps: bool) -> None:
    thread = WatchedThread(on_accelerator=False)
    seen: list[bool] = []
    done = threading.Event()

    class Waiting(torch.autograd.Function):
        """Takes its time in a backward: asleep as in a reduction, or busy."""

        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            while not done.is_set():
                if sleeps:
                    done.wait(0.2)
            return gradient

    def look() -> None:
        for _ in range(20):
            time.sleep(0.005)
            # The frames below are those of this test, and in a run those of the reduction, which are native.
            frame = thread.frame()
            while frame is not None and frame.f_code.co_name != "_engine_run_backward":
                frame = frame.f_back
            if frame is not None:
                seen.append(thread.waits(frame))
        done.set()

    looker = threading.Thread(target=look)
    looker.start()
    value = torch.ones(1, requires_grad=True)
    Waiting.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    looker.join()
    assert seen and (sum(seen) > len(seen) / 2) is sleeps


@pytest.mark.parametrize("sleeps", [True, False])
def test_forked_process_sees_a_waiting_backward(sleeps: bool) -> None:
    assert wait(fork(_watch_a_backward, sleeps)) == 0


def test_failure_in_the_watch_ends_the_watch_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> float:
        if threading.current_thread() is threading.main_thread():
            return 0.0
        raise RuntimeError("out of order")

    with caplog.at_level(logging.ERROR, "danling"):
        watch = watched(tmp_path, clock=fails)
        watch.training_started()
        until(lambda: caplog.records)
    watch.training_ended()
    assert "training continues without it" in caplog.text and "out of order" in caplog.text


def test_no_frame_is_kept_alive(tmp_path: Path) -> None:
    class Big:
        """Is gone when its function has returned."""

    gone = threading.Event()
    watch = watched(tmp_path)

    def hold() -> None:
        big = Big()
        weakref.finalize(big, gone.set)
        for _ in range(10):
            watch.look()

    hold()
    assert gone.is_set()


def becomes(pid: int, fate: str) -> None:
    until(lambda: fate in fate_of(pid))


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
    given = {
        "host": "a",
        "waits": True,
        "collective": "all_reduce",
        "called": "x",
        "location": "",
        "stack": "s",
    }
    return RankState(**{"rank": rank, **given, "excuse": "", "time": 0.0, **more})


def test_report_has_stacks_then_waiting_ranks_then_their_cause() -> None:
    states = [state(rank) for rank in range(6)]
    states[4] = state(4, collective="barrier", called="user.py:3 in f", host="b", stack="t")
    assert report(states, {6: "process 3 on c"}).splitlines() == [
        "Ranks 0-3, 5 on a (most recent call last):",
        "s",
        "Rank 4 on b (most recent call last):",
        "t",
        "Ranks 0-3, 5 on a wait in all_reduce, called at x.",
        "Rank 4 on b waits in barrier, called at user.py:3 in f.",
        "Rank 6 gives no sign: process 3 on c.",
    ]
    busy = {"waits": False, "location": "p", "excuse": "compiling"}
    assert report([state(0, **busy), state(1, **busy)], {}).endswith(
        "Ranks 0, 1 on a are at p (compiling)."
    )
    assert report([state(0, **busy), state(1)], {}).endswith(
        "Rank 0 on a is not in it, but at p (compiling)."
    )


def frame_in(*files: str, innermost: str = "step_0") -> Any:
    """Return the innermost frame of functions of files, the outermost first."""
    inner: Any = sys._getframe
    for number, file in enumerate(reversed(files)):
        name = innermost if number == 0 else f"step_{number}"
        names: dict[str, Any] = {"inner": inner}
        exec(compile(f"def {name}(): return inner()", file, "exec"), names)
        inner = names[name]
    return inner()


def test_stacks_are_read_as_people_do() -> None:
    dist, danling = (
        str(TORCH / "distributed"),
        str(Path(sys.modules["danling"].__file__ or "").parent),
    )
    c10d = f"{dist}/distributed_c10d.py"
    for between in (
        [f"{danling}/distributed/domain.py", f"{dist}/c10d_logger.py"],
        [f"{dist}/fsdp/_fsdp_common.py"],
    ):
        name, called = collective_of(frame_in("train.py", *between, c10d))
        assert name == "step_0" and called.startswith(f"train.py:1 in step_{len(between) + 1}")
    assert collective_of(frame_in("train.py", f"{danling}/distributed/domain.py"))[0] == "step_0"
    assert collective_of(frame_in("train.py", threading.__file__)) == ("", "")
    backward = frame_in(str(TORCH / "autograd" / "graph.py"), innermost="_engine_run_backward")
    assert collective_of(backward)[0] == "the reduction of gradients at the end of a backward"
    assert (
        location_of(frame_in("train.py", str(TORCH / "nn" / "functional.py")))
        == "train.py:1 in step_1, in step_0"
    )
    loader = frame_in(
        "train.py", str(TORCH / "utils" / "data" / "dataloader.py"), innermost="_try_get_data"
    )
    assert location_of(loader) == "train.py:1 in step_1, waiting for a worker of its data loader"
    assert location_of(None) == "nowhere" and excuse_of(frame_in("train.py")) == ""
    for file, excuse in (
        (str(TORCH / "_dynamo" / "convert_frame.py"), "compiling"),
        ("/usr/lib/python3.11/pdb.py", "in a debugger"),
        (f"{danling}/stream/loader.py", "waiting for a stream"),
        (f"{danling}/torchft/groups.py", "waiting for other replica groups"),
    ):
        assert excuse_of(frame_in("train.py", file, threading.__file__)) == excuse
    # Compiled code that runs is no compilation.
    assert excuse_of(frame_in("train.py", str(TORCH / "_dynamo" / "eval_frame.py"))) == ""
