"""Every call to the system that a save makes fails once: what was there before still loads, and no partial name is visible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FAULTS, Crash, FaultyOs

from danling.distributed import LocalDomain
from danling.runners.checkpoints import CheckpointError, CheckpointSettings, FileCheckpointManager, storage


def _manager(directory: Path, **settings: Any) -> FileCheckpointManager:
    policy = CheckpointSettings(async_mode="disabled", keep_latest_k=2, **settings)
    return FileCheckpointManager(directory, domain=LocalDomain(), run_id="run", settings=policy, step_mode=True)


def _payload(step: int) -> dict[str, Any]:
    return {"format_version": 1, "model": {"weight": torch.full((300,), float(step))}, "state": {"step": step}}


def _save(manager: FileCheckpointManager, step: int, *, history: bool = True, best: bool = True) -> None:
    manager.save_checkpoint(_payload(step), epoch=0, global_step=step, history=history, best=best)


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
    """Save once under a fault; return whether the save was reported as made."""
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
    for path in directory.glob("*.pth"):
        payload = manager.load_checkpoint(path.stem)
        steps[path.stem] = payload["state"]["step"]
        assert payload["model"]["weight"].tolist() == [float(steps[path.stem])] * 300
    assert steps["latest"] in ((4,) if saved else (3, 4))
    assert steps["best"] in ((4,) if saved else (1, 4))
    assert steps["ckpt-s000000000002"] == 2
    # Only when there is a newer one may retention have given up the oldest.
    assert "ckpt-s000000000001" in steps or steps["ckpt-s000000000004"] == 4
    newest = manager.find_latest()
    assert newest is not None and steps[newest] == max(steps.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_fails_once(earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    counting = FaultyOs()
    assert _attempt(shutil.copytree(earlier, tmp_path / "count"), counting, monkeypatch)
    assert len(counting.calls) > 60
    for index in counting.candidates(fault):
        directory = shutil.copytree(earlier, tmp_path / str(index))
        faulty = FaultyOs(index, fault)
        saved = _attempt(directory, faulty, monkeypatch)
        assert faulty.struck
        _check(directory, saved)
        manager = _manager(directory)
        manager.begin("latest")
        _save(manager, 5)
        assert manager.load_checkpoint("latest")["state"]["step"] == 5
        names = {path.name for path in directory.iterdir()}
        assert not [name for name in names if name.startswith(storage.STAGED) or name.endswith(".next")], faulty.calls[
            index
        ]
        # Sums may be left of what retention removed; never a file without sums.
        assert {n for n in names if n.endswith(".pth")} <= {
            n.removesuffix(".sha256") for n in names if n.endswith(".sha256")
        }
        shutil.rmtree(directory)


def test_contents_are_durable_before_they_get_a_name(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(earlier, tmp_path / "traced")
    faulty = FaultyOs()
    assert _attempt(directory, faulty, monkeypatch)
    calls = [name for name, _ in faulty.calls]
    first_link, last_write = calls.index("link"), max(i for i, name in enumerate(calls) if name == "write")
    assert last_write < first_link
    # One for the state and one for each of the three manifests, each after its writes; then the directory.
    assert calls[:first_link].count("fsync") >= 5
    assert calls[len(calls) - 1 - calls[::-1].index("replace") :].count("fsync") >= 1


def test_a_full_disk_is_noticed_before_anything_is_written(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(earlier, tmp_path / "full")
    manager = _manager(directory)
    manager.begin("latest")
    before = sorted(path.name for path in directory.iterdir())

    class Full(FaultyOs):
        def statvfs(self, path: Path) -> Any:
            class Found:
                f_bavail, f_frsize = 1, 1000

            return Found

    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", Full())
        with pytest.raises(CheckpointError, match="Expected 1,260 free bytes .* Received: 1,000"):
            _save(manager, 4)
    assert sorted(path.name for path in directory.iterdir()) == before


def test_file_systems_without_links_get_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Linkless(FaultyOs):
        def link(self, source: Path, target: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(storage, "os", Linkless())
    manager = _manager(tmp_path / "checkpoints")
    _save(manager, 1)
    assert len({path.stat().st_ino for path in manager.directory.glob("*.pth")}) == 3
    assert manager.load_checkpoint("best")["state"]["step"] == 1
