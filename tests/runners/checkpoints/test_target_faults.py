"""Every call to the system that a save of a target makes fails once: what was there before still loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.faults import FAULTS, Crash, FaultyOs

from danling.distributed import LocalDomain
from danling.runners.checkpoints import CheckpointError, CheckpointSettings, TorchDistributedCheckpointManager, storage


def _manager(directory: Path) -> TorchDistributedCheckpointManager:
    policy = CheckpointSettings(async_mode="disabled", keep_latest_k=1)
    return TorchDistributedCheckpointManager(
        directory, domain=LocalDomain(), run_id="run", settings=policy, step_mode=True
    )


def _save(manager: TorchDistributedCheckpointManager, step: int, *, history: bool = True, best: bool = True) -> None:
    payload = {"format_version": 1, "model": {"weight": torch.full((300,), float(step))}, "state": {"step": step}}
    manager.save_checkpoint(payload, epoch=0, global_step=step, history=history, best=best)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process ends here and not the machine: what is synced does not matter, only in which order; and a disk takes its time.
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("earlier") / "checkpoints"
    manager = _manager(directory)
    _save(manager, 1)
    _save(manager, 2, best=False)
    _save(manager, 3, history=False, best=False)
    return directory


def _attempt(directory: Path, faulty: FaultyOs, monkeypatch: pytest.MonkeyPatch) -> bool:
    manager = _manager(directory)
    manager.begin("latest")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", faulty)
        try:
            _save(manager, 4)
        except (CheckpointError, Crash):
            return False
    return True


def _check(directory: Path, saved: bool) -> None:
    manager = _manager(directory)
    steps = {}
    for path in (path for path in directory.iterdir() if path.is_file() and not path.name.startswith(storage.STAGED)):
        payload = manager.load_checkpoint(path.name)
        steps[path.name] = payload["state"]["step"]
        assert payload["model"]["weight"].tolist() == [float(steps[path.name])] * 300
    assert steps["latest"] in ((4,) if saved else (3, 4))
    assert steps["best"] in ((4,) if saved else (1, 4))
    assert "ckpt-s000000000002" in steps or steps["ckpt-s000000000004"] == 4
    newest = manager.find_latest()
    assert newest is not None
    assert manager.load_checkpoint(newest)["state"]["step"] >= max(steps.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_fails_once(earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    counting = FaultyOs()
    assert _attempt(shutil.copytree(earlier, tmp_path / "count"), counting, monkeypatch)
    assert len(counting.calls) > 60
    for index in counting.candidates(fault):
        directory = shutil.copytree(earlier, tmp_path / str(index))
        faulty = FaultyOs(index, fault)
        _check(directory, _attempt(directory, faulty, monkeypatch))
        manager = _manager(directory)
        manager.begin("latest")
        _save(manager, 5)
        assert manager.load_checkpoint("latest")["state"]["step"] == 5
        assert not [path for path in directory.iterdir() if path.name.startswith(storage.STAGED)]
        for target in (directory / "targets").iterdir():
            assert (target / "manifest.sha256").is_file()
        shutil.rmtree(directory)
