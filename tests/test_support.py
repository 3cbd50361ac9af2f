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
from support.kill import python
from support.patience import patience
from support.process_tree import descendants
from support.processes import ProcessFailure, RankTraceback, run_outcomes, run_processes
from support.torchrun import torchrun
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


def _die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep_beside_a_child(seconds: float) -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    time.sleep(seconds)


def test_ranks_form_a_group_and_return_values_by_rank() -> None:
    reports = run_processes(_reduce, Report(-1, torch.ones(2)), world_size=3, init_process_group=True)
    assert [report.rank for report in reports] == [0, 1, 2]
    assert all(torch.equal(report.total, torch.full((2,), 6.0)) for report in reports)


def test_code_can_join_by_the_environment_itself(tmp_path: Path) -> None:
    assert run_processes(_join_by_environment) == [(0, 2, str(tmp_path), 1), (1, 2, str(tmp_path), 1)]


def test_an_error_of_a_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(OwnError, match="unwell") as caught:
        run_processes(_raise_on_rank_one, init_process_group=True)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "_raise_on_rank_one" in str(caught.value.__cause__)


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


_RANKED = """
import os, time
from torch import distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)  # in one write, since the ranks share a file
time.sleep(60)
"""


def test_leaving_a_torchrun_block_ends_agent_and_workers() -> None:
    Path("ranked.py").write_text(_RANKED)
    with torchrun("ranked.py") as job:
        job.wait_for_output("rank 0 of 2")
        job.wait_for_output("rank 1 of 2")
    end = time.monotonic() + patience(10)
    while (left := _running("ranked.py")) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def _running(script: str) -> list[str]:
    return [command for command in descendants(os.getpid()).values() if script in command]


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
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={tests}", str(project)]
    return subprocess.run(command, capture_output=True, text=True, cwd=project).stdout
