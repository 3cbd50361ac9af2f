"""One rank of four is slow or hangs, in real processes: it is named, with the cause or its place; of even ranks none is."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import device
from support.patience import patience, until
from support.processes import fork, free_port, kill, run_outcomes, run_processes
from support.toys import settings
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Dataset

import danling as dl
from danling.cli.main import main
from danling.reporting import read_jsonl
from danling.reporting.rank_times import rank_table

RANK = 2
"""The one that is slow or hangs."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.wait: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.wait()
        return torch.full((4,), float(index % 7)), torch.tensor(index % 2)


class Timed(dl.Runner):
    """A run of which one rank does something else in a place."""

    def __init__(self, config: Any, where: str = "", rank: int = RANK) -> None:
        super().__init__(config)
        self.where = where if self.rank == rank else ""
        self.data = Samples()
        self.datasets = {"train": self.data}
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()


def log_of(run: Path) -> list[str]:
    (log,) = (run / "logs").glob("*.log")
    return log.read_text().splitlines()


USUAL, MORE, UPDATES = 0.02, 0.06, 64
"""Seconds of a micro-batch, and what the slow rank takes more in each update."""


class Slow(Timed):
    def __init__(self, config: Any, where: str, rank: int = RANK) -> None:
        super().__init__(config, where, rank)
        self.data.wait = lambda: time.sleep(MORE / 2 if self.where == "data" else 0.0)

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        time.sleep(USUAL + (MORE if self.where == "computing" else 0.0))
        return super().train_step(data)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(4 * MORE if self.where == "checkpointing" else 0.0)
        return super().state_dict()


def train_slowly(where: str, directory: Path, more: dict[str, Any]) -> None:
    config = settings(
        directory,
        steps=UPDATES,
        dataloader={"batch_size": 2},
        log=True,
        log_interval=8,
        log_seconds=0,
    )
    interval = 4 if where == "checkpointing" else 1000
    with Slow({**config, "checkpoint": {"interval": interval}, **more}, where) as runner:
        runner.train()


def slow_lines(run: Path) -> list[str]:
    return [line.partition("slow: ")[2] for line in log_of(run) if "slow: " in line]


FSDP = {"stack": "parallel", "parallel": {"axes": {"shard": 4}}}


@pytest.mark.parametrize(
    ("where", "more"),
    [
        ("computing", FSDP),
        pytest.param("data", {}, marks=pytest.mark.slow),
        pytest.param("computing", {}, marks=pytest.mark.slow),
        pytest.param("checkpointing", {}, marks=pytest.mark.slow),
    ],
    ids=["computing in FSDP", "data", "computing", "checkpointing"],
)
def test_the_slow_rank_and_the_cause_are_named(
    where: str, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_processes(train_slowly, where, tmp_path, more, world_size=4, timeout=120)
    told = slow_lines(tmp_path)
    words = "waiting for data" if where == "data" else where
    assert told and all(
        line.startswith(f"rank {RANK} on ") and line.endswith(f"({words})") for line in told
    )
    table = rank_table(read_jsonl(tmp_path / "metrics.jsonl"))
    assert (table[0].rank, table[0].cause) == (RANK, where) and table[0].lost > 3 * table[1].lost
    # What was put in, in each update or save; a busy machine adds to it.
    put_in = UPDATES // 4 * 4 * MORE if where == "checkpointing" else UPDATES * MORE
    assert 0.6 * put_in < table[0].lost < sum(table[0].seconds.values())
    assert main(["ranks", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].split()[:2] == ["rank", "host"]
        and lines[1].split()[0] == str(RANK)
        and where in lines[1]
    )


def _train_as_rank(rank: int, port: int, directory: Path) -> None:
    launch = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in launch.items()}, MASTER_ADDR="127.0.0.1")
    with Slow(
        settings(directory, steps=24, dataloader={"batch_size": 2}, log_interval=8), "computing", 1
    ) as runner:
        runner.train()


def test_forked_ranks_wait_in_the_reductions_of_a_backward(tmp_path: Path) -> None:
    """Forked by `os.fork` alone: `multiprocessing` renews what Python knows of the main thread."""
    port = free_port()
    ranks = [fork(_train_as_rank, rank, port, tmp_path) for rank in range(2)]
    try:
        until(
            lambda: all(
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks
            )
        )
    finally:
        codes = [kill(pid) for pid in ranks]
    assert codes == [0, 0]
    (fast, slow) = sorted(
        rank_table(read_jsonl(tmp_path / "metrics.jsonl")), key=lambda row: row.rank
    )
    # A busy machine adds to the times of both.
    assert fast.seconds["waiting"] > max(0.5 * 24 * MORE, slow.seconds["waiting"])
    assert slow.cause == "computing" and slow.lost > fast.lost


def threads_of_one_process(directory: Path) -> list[str]:
    seen: list[str] = []

    class Looked(Slow):
        def train_step(self, data: Any) -> tuple[Any, Tensor]:
            seen.extend(thread.name for thread in threading.enumerate())
            return super().train_step(data)

    with Looked(settings(directory, steps=2, log=True, log_interval=1), "") as runner:
        runner.train()
    return [name for name in seen if name.startswith("danling-rank")]


def test_even_ranks_and_a_run_of_one_process_name_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_processes(train_slowly, "", tmp_path / "even", {}, world_size=4, timeout=120)
    assert slow_lines(tmp_path / "even") == []
    table = rank_table(read_jsonl(tmp_path / "even" / "metrics.jsonl"))
    assert sorted(row.rank for row in table) == [0, 1, 2, 3] and all(
        row.host for row in table if row.seconds
    )
    assert run_processes(threads_of_one_process, tmp_path / "one", world_size=1) == [[]]
    assert not any("ranks" in line for line in read_jsonl(tmp_path / "one" / "metrics.jsonl"))
    assert (
        main(["ranks", str(tmp_path / "one")]) == 3
        and "comm.slow_rank_share" in capsys.readouterr().err
    )
    run_processes(
        train_slowly,
        "",
        tmp_path / "off",
        {"comm": {"slow_rank_share": None}, "steps": 9},
        timeout=120,
    )
    assert not any("ranks" in line for line in read_jsonl(tmp_path / "off" / "metrics.jsonl"))


AT = 60
"""The update that does not come to its end."""


class Stuck(Timed):
    """One rank hangs until that was reported."""

    def warnings(self) -> int:
        return sum(
            file.read_text().count("has not come to its end")
            for file in (self.dir / "logs").glob("*.log")
        )

    def until_said(self) -> None:
        end = time.monotonic() + 40.0
        while not self.warnings() and time.monotonic() < end:
            time.sleep(0.1)
        self.data.wait = lambda: None

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        time.sleep(USUAL)
        if self.state.train.global_step == AT:
            if self.where == "data":
                self.data.wait = self.until_said
            elif self.where == "computing":
                self.until_said()
            elif self.where == "another collective":
                dist.recv(torch.zeros(1), src=0)
        return super().train_step(data)


def hanging(directory: Path, steps: int, seconds: float, **more: Any) -> dict[str, Any]:
    loader, comm = {"batch_size": 2}, {"hang_warning_seconds": seconds}
    base = {
        "dataloader": loader,
        "log": True,
        "log_interval": 50,
        "checkpoint": {"interval": 1000},
        "comm": comm,
    }
    return settings(directory, steps=steps, **{**base, **more})


def train_hanging(where: str, directory: Path, more: dict[str, Any], rank: int = RANK) -> None:
    with Stuck(hanging(directory, AT + 20, 2.0, **more), where, rank) as runner:
        runner.train()


def reports_of(run: Path) -> list[list[str]]:
    """Return the lines of each warning of a run."""
    found: list[list[str]] = []
    for line in log_of(run):
        if "has not come to its end" in line:
            found.append([])
        elif found and re.match(r"\d{4}-\d\d-\d\d ", line):
            break
        if found:
            found[-1].append(line)
    return found


@pytest.mark.parametrize(
    ("where", "rank"), [pytest.param("data", 0, marks=pytest.mark.slow), ("computing", RANK)]
)
def test_one_warning_names_the_rank_waited_for(where: str, rank: int, tmp_path: Path) -> None:
    run_processes(train_hanging, where, tmp_path, {}, rank, world_size=4, timeout=120)
    ((*_, waiting, last),) = reports_of(tmp_path)
    others = "0, 1, 3" if rank == RANK else "1-3"
    assert (
        waiting.startswith(f"Ranks {others} on ")
        and " wait in the reduction of gradients" in waiting
    )
    assert (
        last.startswith(f"Rank {rank} on ")
        and Path(__file__).name in last
        and " in until_said (" in last
    )
    files = sorted((tmp_path / "hangs").glob("*.txt"))
    # The batch that is read slowly is that of the next update.
    step = AT + (where == "data")
    assert [file.name for file in files] == [
        f"step-{step:012d}-rank-{number:05d}.txt" for number in range(4)
    ]
    inside = files[rank].read_text()
    assert "until_said" in inside and ("in __getitem__" in inside) == (where == "data")
    assert "loss.backward()" in files[1].read_text()


def train_hanging_on_device(directory: Path) -> None:
    device.use()
    device.returns_collectives_at_once()
    train_hanging("computing", directory, {}, 1)


@device.needed
def test_rank_waiting_for_its_accelerator_is_reported_as_waiting(tmp_path: Path) -> None:
    device.run_processes(train_hanging_on_device, tmp_path, world_size=2, timeout=120)
    ((*_, waiting, last),) = reports_of(tmp_path)
    # No frame of it is in communication: the device waits, and the host for that.
    assert (
        waiting.startswith("Rank 0 on ") and " waits in work of the device, called at " in waiting
    )
    assert (
        last.startswith("Rank 1 on ")
        and " is not in it, but at " in last
        and " in until_said (" in last
    )


def test_rank_in_another_collective_is_named_before_the_time_limit(tmp_path: Path) -> None:
    seconds = round(patience(8.0))
    limit = {"comm": {"train_timeout_seconds": float(seconds), "hang_warning_seconds": None}}
    began = time.monotonic()
    outcomes = run_outcomes(
        train_hanging, "another collective", tmp_path, limit, world_size=4, timeout=120
    )
    assert time.monotonic() - began < 100 and any(outcome.error is not None for outcome in outcomes)
    ((head, *_, waiting, last),) = reports_of(tmp_path)
    assert f"A collective may take {seconds} s, after which the job ends" in head
    assert (
        waiting.startswith("Ranks 0, 1, 3 on ") and " wait in the reduction of gradients" in waiting
    )
    assert (
        last.startswith(f"Rank {RANK} on ")
        and " waits in recv, called at " in last
        and Path(__file__).name in last
    )


class StuckInEvaluation(Stuck):
    """One rank waits in its first evaluation for a message, which is sent when that was reported."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, "evaluating")
        self.datasets["val"] = Samples()
        self.aside = dist.new_group()
        self.is_first = True

    def send_when_said(self) -> None:
        self.until_said()
        dist.send(torch.zeros(1), dst=RANK, group=self.aside)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        return super().evaluate_steps(split, 2)

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        is_first, self.is_first = self.is_first, False
        if is_first and self.rank == 1:
            threading.Thread(target=self.send_when_said).start()
        elif is_first and self.rank == RANK:
            dist.recv(torch.zeros(1), src=1, group=self.aside)
        return super().evaluate_step(data)


def evaluate_hanging(directory: Path) -> None:
    with StuckInEvaluation(hanging(directory, 1, 2.0)) as runner:
        runner.train()


def test_ranks_that_all_wait_in_an_evaluation_are_reported_also_after_one_update(
    tmp_path: Path,
) -> None:
    run_processes(evaluate_hanging, tmp_path, world_size=4, timeout=120)
    ((head, *_, waiting, last),) = reports_of(tmp_path)
    assert "comm.train_timeout_seconds sets after how long" in head
    assert waiting.startswith("Ranks 0, 1, 3 on ") and " wait in all_reduce, called at " in waiting
    assert (
        last.startswith(f"Rank {RANK} on ")
        and " waits in recv, called at " in last
        and Path(__file__).name in last
    )


class Even(Stuck):
    """A run whose evaluations, saves and first update take longer than an update that hangs, on one rank or on all."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets["val"] = Samples()

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        if self.state.train.global_step == 0:
            time.sleep(1.6 if self.rank else 0.0)
        return super().train_step(data)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        time.sleep(1.6 if self.rank == 1 else 0.0)
        return super().evaluate_steps(split, 2)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(1.6 if self.rank == 3 else 0.0)
        return super().state_dict()


def train_evenly(directory: Path) -> int:
    with Even(hanging(directory, 20, 1.0, checkpoint={"interval": 20})) as runner:
        runner.train()
        return runner.warnings()


def test_slow_evaluations_saves_and_first_updates_raise_no_alarm(tmp_path: Path) -> None:
    assert run_processes(train_evenly, tmp_path, world_size=4, timeout=120) == [0] * 4
    assert not (tmp_path / "hangs").exists()
