"""One rank of four is slowed down, in real processes: it is named, with the right cause, and of even ranks none is."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.cli.main import main
from danling.reporting import read_jsonl
from danling.reporting.rank_times import rank_table

SLOW = 2
USUAL, MORE = 0.02, 0.06
"""Seconds of a micro-batch, and what the slow rank takes more in each update."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that one rank reads slowly, where that is asked for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return torch.full((4,), float(index % 7)), torch.tensor(index % 2)


class Slow(dl.Runner):
    """A run of which one rank is slow."""

    def __init__(self, config: Any, where: str) -> None:
        super().__init__(config)
        self.where = where if self.rank == SLOW else ""
        self.datasets = {"train": Samples(MORE / 2 if self.where == "data" else 0.0)}
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        time.sleep(USUAL + (MORE if self.where == "computing" else 0.0))
        return super().train_step(data)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(4 * MORE if self.where == "checkpointing" else 0.0)
        return super().state_dict()


def _trained(where: str, directory: Path, more: dict[str, Any]) -> None:
    config = {
        "steps": 80,
        "seed": 1,
        "dir": str(directory),
        "dataloader": {"batch_size": 2},
        "optim": {"type": "sgd", "lr": 0.1},
        "log_interval": 8,
        "log_seconds": 0,
        "checkpoint": {"interval": 4 if where == "checkpointing" else 1000},
        **more,
    }
    with Slow(config, where) as runner:
        runner.train()


def lines_of(run: Path) -> list[str]:
    (log,) = (run / "logs").glob("*.log")
    return [line.partition("slow: ")[2] for line in log.read_text().splitlines() if "slow: " in line]


FSDP = {"stack": "parallel", "parallel": {"axes": {"shard": 4}}}


@pytest.mark.parametrize(
    ("where", "more"),
    [
        ("data", {}),
        ("computing", FSDP),
        pytest.param("computing", {}, marks=pytest.mark.slow),
        pytest.param("checkpointing", {}, marks=pytest.mark.slow),
    ],
    ids=["data", "computing in FSDP", "computing", "checkpointing"],
)
def test_the_slow_rank_and_the_cause_are_named(
    where: str, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run_processes(_trained, where, run, more, world_size=4, timeout=120)
    told = lines_of(run)
    words = "waiting for data" if where == "data" else where
    assert told and all(line.startswith(f"rank {SLOW} on ") and line.endswith(f"({words})") for line in told)
    table = rank_table(read_jsonl(run / "metrics.jsonl"))
    assert (table[0].rank, table[0].cause) == (SLOW, where) and table[0].lost > 3 * table[1].lost
    # As much as was put in: 80 updates or 20 saves.
    put_in = 20 * 4 * MORE if where == "checkpointing" else 80 * MORE
    assert 0.6 * put_in < table[0].lost < 1.6 * put_in
    assert main(["ranks", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["rank", "host"] and lines[1].split()[0] == str(SLOW) and where in lines[1]


def _alone(directory: Path) -> list[str]:
    seen: list[str] = []

    class Looked(Slow):
        def train_step(self, data: Any) -> tuple[Any, Tensor]:
            seen.extend(thread.name for thread in threading.enumerate())
            return super().train_step(data)

    with Looked(
        {"steps": 2, "dir": str(directory), "optim": {"type": "sgd", "lr": 0.1}, "log_interval": 1}, ""
    ) as runner:
        runner.train()
    return [name for name in seen if name.startswith("danling-rank")]


def test_even_ranks_and_a_run_of_one_process_name_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_processes(_trained, "", tmp_path / "even", {}, world_size=4, timeout=120)
    assert lines_of(tmp_path / "even") == []
    table = rank_table(read_jsonl(tmp_path / "even" / "metrics.jsonl"))
    assert sorted(row.rank for row in table) == [0, 1, 2, 3] and all(row.host for row in table if row.seconds)
    assert run_processes(_alone, tmp_path / "one", world_size=1) == [[]]
    assert not any("ranks" in line for line in read_jsonl(tmp_path / "one" / "metrics.jsonl"))
    assert main(["ranks", str(tmp_path / "one")]) == 3 and "comm.slow_rank_share" in capsys.readouterr().err
    run_processes(_trained, "", tmp_path / "off", {"comm": {"slow_rank_share": None}, "steps": 9}, timeout=120)
    assert not any("ranks" in line for line in read_jsonl(tmp_path / "off" / "metrics.jsonl"))
