"""Parts of the agent: spares that have ended, and the command line that ranks are told."""

from __future__ import annotations

import shlex
import sys

import pytest

from danling.cli.main import main
from danling.elastic import agent
from danling.elastic.agent import Launch
from danling.elastic.spare import Spare


def test_spare_that_has_ended_is_no_replacement() -> None:
    spare = Spare(sys.executable)
    spare.proc.kill()
    spare.proc.wait()
    assert spare.start(["train.py"], {}, 0) is None
    spare.close()


@pytest.mark.parametrize(
    "words",
    ["--ranks 3", "--ranks 2 --nnodes 2 --rdzv-endpoint node1:29500", "--ranks 2 --spares 0"],
)
def test_ranks_are_told_how_the_command_was_started(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []

    def run_agent(launch: Launch) -> int:
        launches.append(launch)
        return 0

    monkeypatch.setattr("danling.elastic.reconfigure.check_supported", lambda: None)
    monkeypatch.setattr(agent, "run_agent", run_agent)
    assert main(["run", *shlex.split(words), "--", "python", "train.py"]) == 0
    assert launches[0].command == f"danling run {words} --"
