"""Two agents, as on two machines, meet at an address; here both are on this one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience, until
from support.process_tree import descendants, is_alive
from support.processes import free_port

from . import plain_loop
from .test_command import notes_of, started

_UPDATES = 400


@contextmanager
def _two_agents(
    tmp_path: Path, faults: str, updates: int, slow_until: int
) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--spares", "0"]
    with ExitStack() as stack:
        agents = []
        for _ in range(2):
            agents.append(
                stack.enter_context(
                    started(
                        tmp_path,
                        faults,
                        updates,
                        options=options,
                        ranks=1,
                        SLOW_UNTIL=str(slow_until),
                    )
                )
            )
            # The first one is the machine of the address.
            until(lambda: _listens(port))
        yield agents


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _numbers(tmp_path: Path) -> dict[int, int]:
    """Return the process of each member."""
    return {note["number"]: note["pid"] for note in notes_of(tmp_path) if "number" in note}


def _members(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [note for note in notes_of(tmp_path) if kind in note]


def test_machine_that_is_lost_leaves_the_others(tmp_path: Path) -> None:
    # A rank of the second machine is replaced there; then that machine is lost with it.
    with _two_agents(tmp_path, "1:reduce:10:kill", _UPDATES, slow_until=3) as (first, second):
        until(lambda: any(note["size"] == 2 for note in _members(tmp_path, "again")))
        lost = [second.pid, *descendants(second.pid)]
        assert _numbers(tmp_path)[2] in lost
        os.kill(second.pid, signal.SIGKILL)
        output, _ = first.communicate(timeout=patience(120))
        until(lambda: not any(is_alive(pid) for pid in lost))
    assert first.returncode == 0, output
    assert {note["end"] for note in _members(tmp_path, "end")} == {plain_loop.undisturbed(_UPDATES)}


def test_first_machine_that_is_lost_ends_all(tmp_path: Path) -> None:
    with _two_agents(tmp_path, "", 10**9, slow_until=1) as (first, second):
        until(lambda: len(_numbers(tmp_path)) == 2)
        ranks = [pid for agent in (first, second) for pid in descendants(agent.pid)]
        assert set(_numbers(tmp_path).values()) <= set(ranks)
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not any(is_alive(pid) for pid in ranks))
        output, _ = second.communicate(timeout=patience(60))
    assert second.returncode not in (0, None), output


def test_range_of_machines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from danling.cli.main import main

    with pytest.raises(SystemExit):
        main(["run", "--nnodes", "1:2", "--", "train.py"])
    assert "1:2" in capsys.readouterr().err
