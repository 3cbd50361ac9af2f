"""The harness itself: real ranks, honest failures, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.parts import parts_of
from support.process_tree import descendants
from support.processes import ProcessFailure, RankTraceback, run_outcomes, run_processes
from support.warm import interpreter
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

_kept: list[TCPStore] = []


class OwnError(Exception):
    pass


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise OwnError("rank one is unwell")
    dist.barrier()


def _die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def _return_first_on_rank_zero() -> str:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_first = os.environ["RANK"] == "0"
    store = TCPStore(*address, is_master=is_first, wait_for_workers=False)
    _kept.append(store)  # as torch keeps that of a group
    if is_first:
        store.set("process", str(os.getpid()))
        return ""
    first = int(store.get("process"))
    end = time.monotonic() + 0.5
    while time.monotonic() < end and Path(f"/proc/{first}").exists():
        time.sleep(0.01)
    return store.get("process").decode()


def _sleep_beside_a_child(seconds: float) -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    time.sleep(seconds)


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


def test_the_store_is_there_until_all_ranks_have_returned() -> None:
    """A rank may still be connecting, by what the others have put into the store."""
    first, second = run_processes(_return_first_on_rank_zero)
    assert (first, second.isdigit()) == ("", True)


def test_a_hang_ends_at_the_timeout_with_all_descendants() -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessFailure, match=r"did not end.*timeout 1 s"):
        run_processes(_sleep_beside_a_child, 60.0, timeout=1.0)
    assert time.monotonic() - begin < 55.0
    assert not [
        command for command in descendants(os.getpid()).values() if "time.sleep(60.0)" in command
    ]


def test_leftover_process_fails_its_test(pytester_run: str) -> None:
    assert "Expected no process to outlive the test" in pytester_run
    assert "1 passed, 1 error" in pytester_run


@pytest.fixture
def pytester_run(tmp_path: Path) -> str:
    """Run a test that leaves a grandchild behind, under this project's conftest, and return what pytest says."""
    return _pytest(
        tmp_path / "project",
        "import subprocess, sys\ndef test_leak():\n    subprocess.run(['sh', '-c', 'sleep 60 &'], check=True)\n",
    )


@pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info >= (3, 14), reason="the server is no fork there"
)
def test_workers_are_forks_of_a_process_that_has_loaded_the_tests_once(tmp_path: Path) -> None:
    """Loading them takes 25 s of the processor."""
    loads = tmp_path / "loads"
    test = f"""
        import os, pytest
        with open({str(loads)!r}, "a") as file:
            print(os.getpid(), file=file)
        @pytest.mark.parametrize("number", range(2))
        def test_one(number, worker_id):
            assert worker_id in ("gw0", "gw1")
        def test_broken():
            left = 1
            assert left == 2
    """
    printed = _pytest(tmp_path / "project", textwrap.dedent(test), "-n", "2")
    assert "1 failed, 2 passed" in printed
    assert "assert 1 == 2" in printed
    assert len(loads.read_text().split()) == 1


def _pytest(project: Path, test: str, *options: str) -> str:
    """Run a test file under this project's conftest, and return what pytest says."""
    tests = Path(__file__).parent
    project.mkdir()
    (project / "conftest.py").write_text((tests / "conftest.py").read_text())
    (project / "test_it.py").write_text(test)
    command = [
        interpreter(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={tests}",
        *options,
        str(project),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=project).stdout


@pytest.mark.parametrize("count", [3, 10])
def test_variants_of_a_test_are_in_different_parts_and_another_test_moves_none(count: int) -> None:
    variants = [f"tests/test_a.py::test_one[{number}]" for number in range(12)]
    parts = parts_of(variants, count)
    assert sorted(parts[:count]) == list(range(count))
    others = [f"tests/test_b.py::test_{number}" for number in range(50)]
    assert parts_of([*others, *variants], count)[50:] == parts
    assert len(set(parts_of(others, count))) > count // 2
