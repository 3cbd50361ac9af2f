"""Who waits for a save hears of it when it is on the disk, and not before."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from danling.checkpoints import FileCheckpointManager
from danling.checkpoints.dcp import TorchDistributedCheckpointManager
from danling.checkpoints.manager import CheckpointSettings
from danling.distributed import LocalDomain

KINDS = {"file": FileCheckpointManager, "dcp": TorchDistributedCheckpointManager}


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_is_told_when_it_can_be_loaded(tmp_path: Path, kind: str, mode: str) -> None:
    settings = CheckpointSettings(async_mode=mode)
    manager = KINDS[kind](tmp_path, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True)
    heard: list[tuple[int, bool, int]] = []

    def hear(payload: Mapping[str, Any]) -> None:
        found = any(tmp_path.glob("latest*"))
        heard.append((payload["dataloaders"]["train"]["consumed"], found, threading.get_ident()))

    manager.after_save = hear
    for consumed in (4, 8):
        payload = {"model": {"w": torch.ones(2)}, "dataloaders": {"train": {"consumed": consumed}}}
        manager.save_checkpoint(payload, epoch=0, global_step=consumed, history=True)
    manager.wait()
    assert [(consumed, found) for consumed, found, _ in heard] == [(4, True), (8, True)]
    here = {thread == threading.get_ident() for _, _, thread in heard}
    assert here == {mode == "disabled"}
    manager.export_model({"model": {"w": torch.ones(2)}}, epoch=0, global_step=8)
    manager.wait()
    assert len(heard) == 2
    manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_is_not_told(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CheckpointSettings(async_mode=mode)
    manager = FileCheckpointManager(tmp_path, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True)
    heard: list[object] = []
    manager.after_save = heard.append

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manager.store, "write", full)
    with pytest.raises(Exception, match="No space left"):
        manager.save_checkpoint({"model": {}, "dataloaders": {}}, epoch=0, global_step=1)
        manager.wait()
    assert heard == []
    manager.close()
