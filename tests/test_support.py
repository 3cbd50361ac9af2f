"""The harness itself: real ranks, honest failures, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.kill import kill_after, kill_when, python, run_python
from support.patience import patience
from support.process_tree import descendants, offspring, seconds_of_start
from support.processes import ProcessFailure, RankTraceback, run_outcomes, run_processes
from support.torchrun import run_torchrun, torchrun
from support.warm import interpreter
from torch import distributed as dist
from torch import nn

from danling.distributed.environment import LaunchEnvironment, destroy_process_group, init_process_group


@dataclass
class Report:
    """A class of the test file, so that pickling both ways is seen to work."""

    rank: int
    total: torch.Tensor


class OwnError(Exception):
    pass


def _reduce(report: Report) -> Report:
    total = report.total + dist.get_rank()
    dist.all_reduce(total)
    return Report(dist.get_rank(), total)


def _join_by_environment() -> tuple[int, int, str, int]:
    launch = LaunchEnvironment.read()
    assert init_process_group(launch, torch.device("cpu"))
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    del model
    destroy_process_group()
    return launch.rank, launch.world_size, os.getcwd(), torch.get_num_threads()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise OwnError("rank one is unwell")
    dist.barrier()


def _raise_locally() -> None:
    class Local(Exception):
        pass

    raise Local("no one else knows me")


def _die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_with(code: int) -> None:
    raise SystemExit(code)


def _sleep_beside_a_child(seconds: float) -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    time.sleep(seconds)


def _read_variable(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_form_a_group_and_return_values_by_rank() -> None:
    reports = run_processes(_reduce, Report(-1, torch.ones(2)), world_size=3, init_process_group=True)
    assert [report.rank for report in reports] == [0, 1, 2]
    assert all(torch.equal(report.total, torch.full((2,), 6.0)) for report in reports)


def test_code_can_join_by_the_environment_itself(tmp_path: Path) -> None:
    assert run_processes(_join_by_environment) == [(0, 2, str(tmp_path), 1), (1, 2, str(tmp_path), 1)]


def test_the_environment_of_the_test_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "1")
    assert run_processes(_read_variable, "OF_THE_TEST", world_size=1) == ["1"]
    assert run_processes(_read_variable, "OF_THE_CALL", world_size=1, environment={"OF_THE_CALL": "2"}) == ["2"]
    monkeypatch.delenv("OF_THE_TEST")
    assert run_processes(_read_variable, "OF_THE_TEST", world_size=1) == [None]


def test_an_error_of_a_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(OwnError, match="unwell") as caught:
        run_processes(_raise_on_rank_one, init_process_group=True)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "_raise_on_rank_one" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_carried_keeps_its_words() -> None:
    with pytest.raises(ProcessFailure, match="Local: no one else knows me"):
        run_processes(_raise_locally, world_size=1)


def test_an_exit_is_seen_as_such() -> None:
    with pytest.raises(SystemExit) as caught:
        run_processes(_exit_with, 143, world_size=1)
    assert caught.value.code == 143


def test_a_killed_rank_is_named() -> None:
    outcomes = {outcome.rank: outcome for outcome in run_outcomes(_die_on_rank_one)}
    assert outcomes[0].error is None
    assert outcomes[1].exit_code == -9
    with pytest.raises(ProcessFailure, match="Rank 1 died with exit code -9"):
        run_processes(_die_on_rank_one)


def test_a_hang_ends_at_the_timeout_with_all_descendants() -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessFailure, match=r"did not end.*timeout 1 s"):
        run_processes(_sleep_beside_a_child, 60.0, timeout=1.0)
    assert time.monotonic() - begin < 55.0
    assert not [command for command in descendants(os.getpid()).values() if "time.sleep(60.0)" in command]


def test_a_lambda_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="top of the file"):
        run_processes(lambda: None)


_RANKED = """
import os, time
from torch import distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)  # in one write, since the ranks share a file
time.sleep(float(os.environ.get("PAUSE", "0")))
dist.destroy_process_group()
"""


# A cold one takes ten seconds of processor time to start.
@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_torchrun_runs_a_script_and_keeps_its_output(warm: bool) -> None:
    Path("ranked.py").write_text(_RANKED)
    exit_code, output = run_torchrun("ranked.py", warm=warm)
    assert exit_code == 0, output
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output


@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_leaving_a_torchrun_block_ends_agent_and_workers(warm: bool) -> None:
    Path("ranked.py").write_text(_RANKED)
    with torchrun("ranked.py", environment={"PAUSE": "60"}, warm=warm) as job:
        job.wait_for_output("rank 0")
        job.wait_for_output("rank 1")
        # The forks of the server are no children of the job: they end by themselves when they see it gone.
        assert warm or len(descendants(job.pid)) >= 2
    end = time.monotonic() + patience(10)
    while (left := _running("ranked.py")) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def _running(script: str) -> list[str]:
    return [command for command in descendants(os.getpid()).values() if script in command]


_WRITER = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n"


def test_a_script_is_killed_at_the_given_moment() -> None:
    Path("writer.py").write_text(_WRITER)
    with python("writer.py") as job:
        assert kill_when(job, Path("begun").exists).exit_code == -signal.SIGKILL
    with python("writer.py") as job:
        assert kill_after(job, 0.05).exit_code == -signal.SIGKILL


_PROGRAM = """
import os, signal, sys
print(sorted(set(globals())), __name__, sys.argv, os.path.basename(sys.path[0]), os.environ.get("ASKED"), sys.stdin.read(), flush=True)
print("to standard error", file=sys.stderr, flush=True)
how = sys.argv[1]
if how == "raise":
    raise ValueError("unwell")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how) if how.isdigit() else how)
"""


@pytest.mark.parametrize("how", ["0", "7", "in words", "raise", "kill"])
def test_a_warm_program_ends_as_python_does(how: str) -> None:
    Path("program.py").write_text(_PROGRAM)
    cold, warm = (run_python("program.py", how, warm=warm, environment={"ASKED": "1"}) for warm in (False, True))
    assert warm == cold
    assert ("to standard error" in warm.output) and "'__spec__'" in warm.output


_LISTENER = """
import signal, sys, time
def leave(number, frame):
    sys.exit(40 + number)
signal.signal(signal.SIGUSR1, leave)
print("ready", flush=True)
time.sleep(60)
"""


def test_signals_reach_a_warm_program() -> None:
    Path("listener.py").write_text(_LISTENER)
    for number, code in ((signal.SIGUSR1, 40 + signal.SIGUSR1), (signal.SIGTERM, -signal.SIGTERM)):
        with python("listener.py", warm=True) as job:
            job.wait_for_output("ready")
            job.signal(number)
            assert job.wait().exit_code == code


def test_a_warm_program_that_was_killed_is_gone_before_the_next_one_starts() -> None:
    Path("own.py").write_text("import os, time\nprint(f'pid {os.getpid()}.', flush=True)\ntime.sleep(60)\n")
    Path("look.py").write_text("import os, sys\nprint(os.path.exists('/proc/' + sys.argv[1]))\n")
    with python("own.py", warm=True) as job:
        job.wait_until(lambda: job.output.endswith(".\n"))
        process = job.output.split()[1].strip(".")
        job.kill()
        assert run_python("look.py", process, warm=True) == (0, "False\n")


def test_a_script_that_ends_too_early_says_what_it_printed() -> None:
    Path("short.py").write_text("print('good bye')")
    assert run_python("short.py") == (0, "good bye\n")
    with pytest.raises(AssertionError, match="good bye"), python("short.py") as job:
        kill_when(job, Path("never").exists)


def test_a_process_that_begins_in_the_same_step_of_the_clock_counts() -> None:
    with subprocess.Popen(["sleep", "60"]) as job:
        began = seconds_of_start(job.pid)
        assert job.pid in offspring(os.getpid(), since=began)
        assert job.pid not in offspring(os.getpid(), since=began + 0.01)
        job.kill()


def test_a_test_that_leaves_a_process_fails(pytester_run: str) -> None:
    assert "Expected no process to outlive the test" in pytester_run
    assert "1 passed, 1 error" in pytester_run


@pytest.fixture
def pytester_run(tmp_path: Path) -> str:
    """Run a test that leaves a grandchild behind, under this project's conftest, and return what pytest says."""
    tests = Path(__file__).parent
    project = tmp_path / "project"
    project.mkdir()
    (project / "conftest.py").write_text((tests / "conftest.py").read_text())
    (project / "test_leak.py").write_text(
        "import subprocess, sys\ndef test_leak():\n    subprocess.run(['sh', '-c', 'sleep 60 &'], check=True)\n"
    )
    command = [
        interpreter(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={tests}",
        str(project),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=project).stdout


def test_garbage_is_collected_in_the_controller_of_xdist_too(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import gc, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from support.collecting import pytest_collection as pytest_collection\n"
        "def pytest_unconfigure(config):\n"
        "    name = 'worker' if hasattr(config, 'workerinput') else 'controller'\n"
        f"    open({str(tmp_path)!r} + '/' + name, 'w').write(str(gc.isenabled()))\n"
    )
    (tmp_path / "test_one.py").write_text("import gc\ndef test_one():\n    assert gc.isenabled()\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout
    assert [(tmp_path / name).read_text() for name in ("controller", "worker")] == ["True", "True"]
