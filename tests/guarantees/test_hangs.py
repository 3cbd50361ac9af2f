"""One rank of four stands still, in real processes: it is named, and where it is; a run in which all is slow at times raises no alarm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Dataset

import danling as dl

STUCK = 2
AT = 60
"""The update that does not come to its end."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples; reading one may take as long as a test wants."""

    def __init__(self) -> None:
        self.wait: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.wait()
        return torch.full((4,), float(index % 7)), torch.tensor(index % 2)


class Stuck(dl.Runner):
    """A run of which one rank stands still once, until that was said."""

    def __init__(self, config: Any, where: str, rank: int) -> None:
        super().__init__(config)
        self.where = where if self.rank == rank else ""
        self.data = Samples()
        self.datasets = {"train": self.data}
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()
        self.said = 0

    def warnings(self) -> int:
        return sum(file.read_text().count("has not come to its end") for file in (self.dir / "logs").glob("*.log"))

    def until_said(self, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while self.warnings() <= self.said and time.monotonic() < end:
            time.sleep(0.1)
        self.data.wait = lambda: None

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        time.sleep(0.02)
        if self.state.train.global_step == AT:
            if self.where == "data":
                self.data.wait = self.until_said
            elif self.where == "computing":
                self.until_said()
            elif self.where == "silent":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.where == "another collective":
                dist.recv(torch.zeros(1), src=0)
        return super().train_step(data)


def _trained(where: str, directory: Path, more: dict[str, Any], rank: int = STUCK) -> None:
    config = {
        "steps": AT + 20,
        "seed": 1,
        "dir": str(directory),
        "dataloader": {"batch_size": 2},
        "optim": {"type": "sgd", "lr": 0.1},
        "log_interval": 50,
        "checkpoint": {"interval": 1000},
        "comm": {"hang_warning_seconds": 2.0},
        **more,
    }
    with Stuck(config, where, rank) as runner:
        if where == "silent" and runner.rank == 0:
            # Who goes on after it: this rank, which waits in native code, does so by a thread.
            pids = _pids(directory)
            threading.Thread(target=_woken, args=(runner, pids), daemon=True).start()
        (directory / f"pid-{runner.rank}").write_text(str(os.getpid()))
        runner.train()


def _pids(directory: Path) -> Callable[[], int]:
    return lambda: int((directory / f"pid-{STUCK}").read_text())


def _woken(runner: Stuck, pid: Callable[[], int]) -> None:
    runner.until_said(60.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid(), signal.SIGCONT)


def told(run: Path) -> list[list[str]]:
    """Return the lines of each warning of a run."""
    (log,) = (run / "logs").glob("*.log")
    found: list[list[str]] = []
    for line in log.read_text().splitlines():
        if "has not come to its end" in line:
            found.append([])
        elif found and re.match(r"\d{4}-\d\d-\d\d ", line):
            break
        if found:
            found[-1].append(line)
    return found


@pytest.mark.parametrize(("where", "rank"), [pytest.param("data", 0, marks=pytest.mark.slow), ("computing", STUCK)])
def test_one_warning_names_the_rank_that_the_others_wait_for(where: str, rank: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_processes(_trained, where, run, {}, rank, world_size=4, timeout=120)
    ((*_, waiting, last),) = told(run)
    others = "0, 1, 3" if rank == STUCK else "1-3"
    assert waiting.startswith(f"Ranks {others} on ") and " wait in the reduction of gradients" in waiting
    assert last.startswith(f"Rank {rank} on ") and "test_hangs.py" in last and " in until_said (" in last
    files = sorted((run / "hangs").glob("*.txt"))
    # The batch that is read slowly is that of the next update.
    step = AT + (where == "data")
    assert [file.name for file in files] == [f"step-{step:012d}-rank-{number:05d}.txt" for number in range(4)]
    inside = files[rank].read_text()
    assert "until_said" in inside and ("in waiting" in inside) == (where == "data")
    assert "loss.backward()" in files[1].read_text()


@pytest.mark.slow
def test_a_process_that_stands_still_as_a_whole_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_processes(_trained, "silent", run, {}, world_size=4, timeout=120)
    ((*_, last),) = told(run)
    assert last.startswith(f"Rank {STUCK} gives no sign: process ") and last.endswith("which is stopped (SIGSTOP).")


def test_before_the_time_limit_it_is_said_who_is_in_another_collective(tmp_path: Path) -> None:
    run = tmp_path / "run"
    limit = {"comm": {"train_timeout_seconds": 14.0, "hang_warning_seconds": None}}
    began = time.monotonic()
    outcomes = run_outcomes(_trained, "another collective", run, limit, world_size=4, timeout=120)
    assert time.monotonic() - began < 100 and any(outcome.error is not None for outcome in outcomes)
    ((head, *_, waiting, last),) = told(run)
    assert "A collective may take 14 s, after which the job ends" in head
    assert waiting.startswith("Ranks 0, 1, 3 on ") and " wait in the reduction of gradients" in waiting
    assert last.startswith(f"Rank {STUCK} on ") and " waits in recv, called at " in last and "test_hangs.py" in last


class Even(Stuck):
    """A run whose evaluations, saves and first update take longer than an update that hangs, on one rank or on all."""

    def __init__(self, config: Any, where: str, rank: int) -> None:
        super().__init__(config, where, rank)
        self.datasets["val"] = Samples()

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        if self.state.train.global_step == 0:
            time.sleep(2.5 if self.rank else 0.0)
        return super().train_step(data)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        time.sleep(3.0 if self.rank == 1 else 0.0)
        return super().evaluate_steps(split, 2)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(3.0 if self.rank == 3 else 0.0)
        return super().state_dict()


def _even(directory: Path) -> int:
    config = {
        "steps": 20,
        "seed": 1,
        "dir": str(directory),
        "dataloader": {"batch_size": 2},
        "optim": {"type": "sgd", "lr": 0.1},
        "checkpoint": {"interval": 20},
        "comm": {"hang_warning_seconds": 1.0},
    }
    with Even(config, "", STUCK) as runner:
        runner.train()
        return runner.warnings()


def test_slow_evaluations_saves_and_first_updates_raise_no_alarm(tmp_path: Path) -> None:
    assert run_processes(_even, tmp_path / "run", world_size=4, timeout=120) == [0] * 4
    assert not (tmp_path / "run" / "hangs").exists()
