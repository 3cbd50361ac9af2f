"""Small saves through the managers themselves, of files and of targets, in one process.

manager = make_manager("dcp", tmp_path / "checkpoints")
save(manager, 1)
load(manager, "latest")         # 1; raises when the weights are not those of that step
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from danling.distributed import LocalDomain
from danling.runners.checkpoints import (
    CheckpointManager,
    CheckpointSettings,
    FileCheckpointManager,
    TorchDistributedCheckpointManager,
)

KINDS = ("file", "dcp")


def make_manager(
    kind: str, directory: Path, *, mode: str = "disabled", keep: int = 2, **settings: Any
) -> CheckpointManager:
    """Return a manager of one process for a run named `run`.

    Args:
        kind: `"file"` or `"dcp"`.
        directory: Where its checkpoints lie.
        mode: `checkpoint.async_mode`.
        keep: `checkpoint.keep_latest_k`.
        settings: Further settings.
    """
    policy = CheckpointSettings(async_mode=mode, keep_latest_k=keep, **settings)
    made = FileCheckpointManager if kind == "file" else TorchDistributedCheckpointManager
    return made(directory, domain=LocalDomain(), run_id="run", settings=policy, step_mode=True)


def payload(step: int) -> dict[str, Any]:
    """Return a state in which the weights say which step it is of."""
    return {"format_version": 1, "model": {"weight": torch.full((300,), float(step))}, "state": {"step": step}}


def save(manager: CheckpointManager, step: int, *, history: bool = True, best: bool = True) -> None:
    """Save the state of a step, and wait until it is written."""
    manager.save_checkpoint(payload(step), epoch=0, global_step=step, history=history, best=best)
    manager.wait()


def load(manager: CheckpointManager, source: str | Path) -> int:
    """Load a checkpoint and return its step."""
    loaded = manager.load_checkpoint(source)
    step: int = loaded["state"]["step"]
    assert loaded["model"]["weight"].tolist() == [float(step)] * 300
    return step


def go_on(
    kind: str, directory: Path, step: int, *, mode: str = "disabled", keep: int = 2
) -> tuple[int | None, CheckpointManager]:
    """Do what a restart does: load the newest checkpoint that verifies, and save a step.

    Returns:
        The step that was loaded, `None` when there was none; and the manager.
    """
    manager = make_manager(kind, directory, mode=mode, keep=keep)
    source = manager.find_latest()
    found = None
    if source is not None:
        found = load(manager, source)
        manager.begin(source)
    save(manager, step)
    return found, manager


def record_saves(kind: str, directory: Path, steps: Iterable[int] = (1, 2, 3), *, keep: int = 2) -> Path:
    """Make a directory with saves: the first one is the best, and the last one has no name in history."""
    manager = make_manager(kind, directory, keep=keep)
    *earlier, last = steps
    for step in earlier:
        save(manager, step, best=step == earlier[0])
    save(manager, last, history=False, best=False)
    manager.close()
    return directory
