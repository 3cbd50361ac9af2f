"""G6, the data's part: on another number of processes an epoch goes on at the sample where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.processes import run_processes
from support.toys import TracingRunner


def train(root: str, batch_size: int, stop_at: int | None, resume: str | None = None) -> tuple[list[int], str]:
    config: dict[str, Any] = {
        "epochs": 2,
        "seed": 4,
        "dataloader": {"batch_size": batch_size, "drop_last": False},
        "optim": {"type": "sgd", "lr": 1e-2},
        "workspace_root": root,
        "resume": resume,
        "log": False,
    }
    with TracingRunner(config, stop_at=stop_at, train_size=50) as runner:
        runner.train()
        return runner.ids, str(runner.workspace.checkpoints / "latest.pth")


def global_order(ranks: list[list[int]], batch_size: int) -> list[int]:
    """Interleave the ranks' samples by batch; the ragged end is handled by taking what is left in rank order."""
    order: list[int] = []
    for start in range(0, max(map(len, ranks)), batch_size):
        for ids in ranks:
            order += ids[start : start + batch_size]
    return order


def test_two_one_three_processes_keep_the_order(tmp_path: Path) -> None:
    whole = run_processes(train, str(tmp_path / "whole"), 6, None, world_size=1)[0][0]
    assert sorted(whole[:50]) == sorted(whole[50:]) == list(range(50))
    seen: list[int] = []
    resume = None
    # An update sees six samples in each layout, whatever the number of processes.
    for world_size, batch_size, stop_at in ((2, 3, 3), (1, 6, 6), (3, 2, 8)):
        ranks = run_processes(
            train, str(tmp_path / str(world_size)), batch_size, stop_at, resume, world_size=world_size
        )
        seen += global_order([ids for ids, _ in ranks], batch_size)
        resume = ranks[0][1]
        assert seen == whole[: 6 * stop_at]
    rest = run_processes(train, str(tmp_path / "last"), 6, None, resume, world_size=1)[0][0]
    assert seen + rest == whole
