"""Small saves through the managers themselves, of files and of targets, in one process.

manager = make_manager("dcp", tmp_path / "checkpoints")
save(manager, 1)
load(manager, "latest")         # 1; fails when the weights are not those of that step
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.checkpoints import (
    CheckpointManager,
    CheckpointSettings,
    FileCheckpointManager,
    TorchDistributedCheckpointManager,
    storage,
)
from danling.distributed import LocalDomain
from danling.reporting import read_jsonl

KINDS = ("file", "dcp")


def rows(run: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Return the step and the names of each row of `metrics.jsonl`, without the entries that each row has."""
    records = read_jsonl(run / "metrics.jsonl")
    return [
        (int(str(record["step"])), tuple(sorted({*record} - {"step", "time", "ranks"})))
        for record in records
    ]


def make_manager(
    kind: str,
    directory: Path,
    *,
    mode: str = "disabled",
    keep: int = 2,
    run: str = "run",
    **settings: Any,
) -> CheckpointManager:
    policy = CheckpointSettings(async_mode=mode, keep_latest_k=keep, **settings)
    made = FileCheckpointManager if kind == "file" else TorchDistributedCheckpointManager
    return made(directory, domain=LocalDomain(), run_id=run, settings=policy, step_mode=True)


def weights(step: int) -> Tensor:
    """Return the weights after so many updates, from the first one on."""
    found = torch.ones(300, dtype=torch.float64)
    for number in range(1, step + 1):
        found = update(found, number)
    return found


def update(previous: Tensor, step: int) -> Tensor:
    """Return the weights after the update of a step: they depend on all before it."""
    return previous.mul(1.01).add(step).sin()


def payload(step: int, previous: Tensor | None = None) -> dict[str, Any]:
    state = weights(step) if previous is None else update(previous, step)
    return {"format_version": 1, "model": {"weight": state}, "state": {"step": step}}


def save(manager: CheckpointManager, step: int, *, history: bool = True, best: bool = True) -> None:
    """Save the state of a step, and wait until it is written."""
    manager.save_checkpoint(payload(step), epoch=0, global_step=step, history=history, best=best)
    manager.wait()


def load(manager: CheckpointManager, source: str | Path) -> int:
    """Load a checkpoint and return its step."""
    loaded = manager.load_checkpoint(source)
    step: int = loaded["state"]["step"]
    assert torch.equal(loaded["model"]["weight"], weights(step)), (
        "weights and step of different saves"
    )
    return step


def go_on(
    kind: str, directory: Path, step: int, *, mode: str = "disabled", keep: int = 2
) -> tuple[int | None, CheckpointManager]:
    """Do what a restart does: load the newest checkpoint that verifies, and save a step."""
    manager = make_manager(kind, directory, mode=mode, keep=keep)
    source = manager.find_latest()
    found = None
    if source is not None:
        found = load(manager, source)
        manager.begin(source)
    save(manager, step)
    return found, manager


def record_saves(
    kind: str, directory: Path, steps: Iterable[int] = (1, 2, 3), *, keep: int = 2
) -> Path:
    """Make a directory with saves: the first one is the best, and the last one has no name in history."""
    manager = make_manager(kind, directory, keep=keep)
    *earlier, last = steps
    for step in earlier:
        save(manager, step, best=step == earlier[0])
    save(manager, last, history=False, best=False)
    manager.close()
    return directory


def train_on(kind: str, directory: Path, until: int, *, mode: str = "disabled") -> int:
    """Go on from the newest checkpoint that verifies, as a run does: an update and a save for each step, each in history."""
    manager = make_manager(kind, directory, mode=mode)
    source = manager.find_latest()
    begun, found = 0, torch.ones(300, dtype=torch.float64)
    if source is not None:
        loaded = manager.load_checkpoint(source)
        begun, found = loaded["state"]["step"], loaded["model"]["weight"]
        manager.begin(source)
    for step in range(begun + 1, until + 1):
        state = payload(step, found)
        found = state["model"]["weight"]
        manager.save_checkpoint(state, epoch=0, global_step=step, history=True, best=step % 2 == 0)
    manager.wait()
    manager.close()
    return begun


def litter(directory: Path) -> list[str]:
    """Return what killed saves have left below a run directory or a directory of checkpoints."""
    names = [
        path
        for path in directory.rglob("*")
        if path.name.startswith(storage.STAGED) or path.suffix == ".next"
    ]
    names += [*directory.rglob(".*.tmp"), *directory.rglob("*.aside-*")]
    names += [path for path in directory.rglob("*.pth.sha256") if not path.with_suffix("").exists()]
    names += [
        path for path in directory.rglob("targets/*") if not (path / "manifest.sha256").exists()
    ]
    return [str(path.relative_to(directory)) for path in names]
