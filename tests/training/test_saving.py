"""Saving a run: what comes before it, who writes, and where the last save stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.distributed import LocalDomain
from danling.training.saving import RunSaver


@dataclass
class Counters:
    """Where a run stands."""

    global_step: int = 3
    epoch: int = 1


class Run:
    """A saver that writes files, and the order in which it asked for things."""

    def __init__(self, root: Path) -> None:
        self.counters = Counters()
        self.calls: list[str] = []
        settings = CheckpointSettings(async_mode="disabled")
        self.manager = FileCheckpointManager(
            root, domain=LocalDomain(), run_id="run", settings=settings, step_mode=False
        )
        self.saver = RunSaver(
            SimpleNamespace(
                checkpoint_manager=self.manager,
                state=SimpleNamespace(train=self.counters),
                checkpoint_state=self.state,
            )  # type: ignore[arg-type]
        )

    def state(self) -> Mapping[str, Any]:
        """Return a payload."""
        self.calls.append("state")
        return {"format_version": 1, "model": {"w": torch.full((2,), float(self.counters.global_step))}}


def test_a_save_is_written_and_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver.before += [lambda: run.calls.append("first"), lambda: run.calls.append("second")]
    assert not run.saver.is_saved
    run.saver.save(history=True, best=True)
    assert run.calls == ["first", "second", "state"]
    assert run.saver.is_saved and run.saver.saved_at == (3, 1)
    assert {path.name for path in tmp_path.glob("*.pth")} == {"latest.pth", "best.pth", "ckpt-e000001.pth"}
    assert run.manager.load_checkpoint("latest")["model"]["w"].tolist() == [3.0, 3.0]
    run.counters.global_step = 4
    assert not run.saver.is_saved


def test_what_is_refused_is_not_written(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def refuse() -> None:
        raise RuntimeError("not a number")

    run.saver.before.append(refuse)
    with pytest.raises(RuntimeError, match="not a number"):
        run.saver.save()
    assert run.calls == [] and run.saver.saved_at is None and not list(tmp_path.glob("*.pth"))


def test_where_another_group_writes_nothing_is_gathered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver.writes = lambda: False
    run.saver.instead.append(lambda: run.calls.append("instead"))
    run.saver.save()
    run.saver.export(lambda: pytest.fail("weights were gathered"))
    assert run.calls == ["instead"] and run.saver.is_saved and not list(tmp_path.glob("*.pth"))


def test_an_export_leaves_latest_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver.export(lambda: {"format_version": 1, "model": {"w": torch.ones(1)}})
    assert {path.name for path in tmp_path.glob("*.pth")} == {"model.pth"} and not run.saver.is_saved
