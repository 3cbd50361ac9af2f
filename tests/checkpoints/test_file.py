"""Checkpoints in files: names, retention, lines, damage, foreign readers, the background."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointSettings,
    FileCheckpointManager,
    read_config,
    read_model,
    storage,
)
from danling.distributed import Domain, LocalDomain


def _manager(directory: Path, *, run_id: str = "run", domain: Any = None, **settings: Any) -> FileCheckpointManager:
    policy = CheckpointSettings(**{"async_mode": "disabled", **settings})
    return FileCheckpointManager(
        directory, domain=domain or LocalDomain(), run_id=run_id, settings=policy, step_mode=True
    )


def _payload(step: int) -> dict[str, Any]:
    weights = {"weight": torch.full((64, 64), float(step))}
    return {"format_version": 1, "runner": {"seed": 7}, "model": weights, "state": {"step": step}}


def _save(manager: FileCheckpointManager, step: int, *, history: bool = False, best: bool = False) -> None:
    manager.save_checkpoint(_payload(step), epoch=0, global_step=step, history=history, best=best)


def _step(manager: FileCheckpointManager, source: str | Path) -> int:
    return int(manager.load_checkpoint(source)["state"]["step"])


def _names(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.pth"))


# Names


def test_one_write_gives_all_names(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    _save(manager, 12, history=True, best=True)
    assert _names(tmp_path) == ["best", "ckpt-s000000000012", "latest"]
    assert len({path.stat().st_ino for path in tmp_path.glob("*.pth")}) == 1
    _save(manager, 13)
    assert [_step(manager, name) for name in _names(tmp_path)] == [12, 12, 13]


def test_a_model_is_exported_beside_the_others(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    _save(manager, 1)
    manager.export_model({"format_version": 1, "model": {"weight": torch.ones(2)}}, epoch=0, global_step=2)
    assert _step(manager, "latest") == 1
    assert read_model(manager, "model")["weight"].tolist() == [1, 1]
    assert manager.find_latest() == "latest"


def test_sources(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(_manager(run / "checkpoints"), 5, history=True)
    other = _manager(tmp_path / "other" / "checkpoints", run_id="another")
    for source in (
        run,
        run / "checkpoints",
        run / "checkpoints" / "latest.pth",
        str(run / "checkpoints" / "ckpt-s000000000005.pth"),
    ):
        assert _step(other, source) == 5
        assert read_config(run) == {"seed": 7}
    with pytest.raises(
        CheckpointNotFound, match=r"there are: ckpt-s000000000005, latest\), or a path. Received: 'ckpt-s1'"
    ):
        _manager(run / "checkpoints").load_checkpoint("ckpt-s1")
    with pytest.raises(CheckpointNotFound):
        read_config(tmp_path / "nothing")


def test_load_only_writes_nothing(tmp_path: Path) -> None:
    _save(_manager(tmp_path / "none", load_only=True), 1)
    assert not (tmp_path / "none").exists()


# Retention and lines


def test_retention_across_restarts(tmp_path: Path) -> None:
    for step in range(1, 7):
        manager = _manager(tmp_path, keep_latest_k=2)
        if step > 1:
            manager.begin("latest")
        _save(manager, step, history=True, best=step == 2)
        manager.close()
    assert _names(tmp_path) == ["best", "ckpt-s000000000002", "ckpt-s000000000005", "ckpt-s000000000006", "latest"]


def test_retention_spares_what_the_run_goes_on_from(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    for step in (1, 2):
        _save(manager, step, history=True)
    again = _manager(tmp_path, keep_latest_k=1)
    again.begin("ckpt-s000000000002")
    for step in (3, 4, 5):
        _save(again, step, history=True)
    assert _names(tmp_path) == ["ckpt-s000000000002", "ckpt-s000000000005", "latest"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    manager = _manager(tmp_path, keep_latest_k=2)
    _save(manager, 1, history=True)
    _save(manager, 2, history=True)
    path = manager.store.path("ckpt-s000000000002")
    path.unlink()
    path.write_bytes(b"cut")
    _save(manager, 3, history=True)
    assert _names(tmp_path) == ["ckpt-s000000000001", "ckpt-s000000000002", "ckpt-s000000000003", "latest"]


def test_going_back_begins_a_line_that_neither_retention_nor_auto_resume_mixes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(tmp_path)
    for step in (1, 2, 3, 4):
        _save(manager, step, history=True)
    back = _manager(tmp_path, keep_latest_k=2)
    back.begin("ckpt-s000000000002")
    assert back.find_latest() == "latest" and _step(back, "latest") == 4
    with caplog.at_level(logging.WARNING, "danling"):
        _save(back, 5, history=True)
    assert "2 saves" in caplog.text and "no longer part of this run" in caplog.text
    # Of the old line 1 goes, as the third newest of ours, and 2 is what we came from; 3 and 4 are not ours to remove.
    assert _names(tmp_path) == [*(f"ckpt-s{step:012d}" for step in (2, 3, 4, 5)), "latest"]
    for name in ("latest", "ckpt-s000000000005"):
        manager.store.path(name).write_bytes(b"")
    assert back.find_latest() == "ckpt-s000000000002"


def test_starting_over_does_not_go_on_from_the_old_saves(tmp_path: Path) -> None:
    _save(_manager(tmp_path), 50, history=True)
    fresh = _manager(tmp_path)
    _save(fresh, 1)
    assert fresh.find_latest() == "latest" and _step(fresh, "latest") == 1
    fresh.store.path("latest").unlink()
    shutil.copy(fresh.store.path("ckpt-s000000000050"), fresh.store.path("latest"))
    with pytest.raises(CheckpointDamaged):
        fresh.load_checkpoint("latest")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    manager.save_checkpoint({"format_version": 99}, epoch=0, global_step=1)
    with pytest.raises(CheckpointMismatch, match="format_version 99"):
        manager.load_checkpoint("latest")
    torch.save({"weight": torch.ones(1)}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointMismatch, match="pretrained"):
        _manager(tmp_path / "x", verify="none").load_checkpoint(tmp_path / "bare.pt")
    assert read_model(manager, tmp_path / "bare.pt")["weight"].tolist() == [1]


# Damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.unlink()
    path.write_bytes(content)


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])


def _empty(path: Path) -> None:
    path.unlink()
    path.touch()


def _swap(path: Path) -> None:
    path.unlink()
    shutil.copy(path.parent / path.name.replace("latest", "ckpt-s000000000001"), path)


@pytest.mark.parametrize("file", ["latest.pth", "latest.pth.sha256"])
@pytest.mark.parametrize("damage", [_flip, _cut, _empty, Path.unlink, _swap])
def test_damage_is_found_named_and_passed_over(
    tmp_path: Path, file: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(tmp_path)
    _save(manager, 1, history=True)
    _save(manager, 2)
    damage(tmp_path / file)
    with pytest.raises((CheckpointDamaged, CheckpointNotFound), match="latest"):
        manager.load_checkpoint("latest")
    with caplog.at_level(logging.WARNING, "danling"):
        assert manager.find_latest() == "ckpt-s000000000001"
        manager.begin("ckpt-s000000000001")
        _save(manager, 3, history=True)
    assert "latest.pth" in caplog.text
    assert manager.find_latest() == "latest" and _step(manager, "latest") == 3


def test_every_bit_matters(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    manager.save_checkpoint({"format_version": 1, "model": {"w": torch.ones(2)}}, epoch=0, global_step=1)
    path, content = manager.store.path("latest"), manager.store.path("latest").read_bytes()
    for offset in range(0, len(content), 41):
        changed = bytearray(content)
        changed[offset] ^= 1 << (offset % 8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match="latest.pth has another SHA-256"):
            manager.load_checkpoint("latest")


def test_levels_of_verification(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    _save(manager, 1)
    content = bytearray(manager.store.path("latest").read_bytes())
    content[len(content) // 2] ^= 4
    manager.store.path("latest").write_bytes(content)
    assert _step(_manager(tmp_path, verify="size"), "latest") == 1
    (tmp_path / "latest.pth.sha256").unlink()
    with pytest.raises(CheckpointDamaged, match="sha256 is missing"):
        manager.load_checkpoint("latest")


# Foreign readers


def test_foreign_readers(tmp_path: Path) -> None:
    manager = _manager(tmp_path, async_mode="async")
    _save(manager, 3, history=True, best=True)
    manager.close()
    for path in tmp_path.glob("*.pth"):
        assert torch.load(path, weights_only=True)["state"] == {"step": 3}
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    sums = [path.name for path in tmp_path.glob("*.sha256")]
    done = subprocess.run(["sha256sum", "--strict", "-c", *sums], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 3, done.stdout + done.stderr


# The background


class _Slow:
    """Holds every write until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.writes = threading.Event(), threading.Event(), 0
        original = storage.write_file

        def write_file(path: Path, write: Callable[[storage.HashingWriter], object]) -> tuple[int, str]:
            if storage.STAGED in path.name:
                self.begun.set()
                assert self.go.wait(20)
            size, digest = original(path, write)
            # An archive of torch's is never that small, and sums always are.
            self.writes += size > 700
            return size, digest

        monkeypatch.setattr(storage, "write_file", write_file)


def test_the_values_of_the_call_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    slow = _Slow(monkeypatch)
    manager = _manager(tmp_path, async_mode="async")
    payload = {
        "format_version": 1,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "state": {"losses": [1.0]},
    }
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    manager.save_checkpoint(payload, epoch=0, global_step=1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    payload["state"]["losses"].append(2.0)
    slow.go.set()
    loaded = manager.load_checkpoint("latest")
    assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moment)
    assert loaded["state"]["losses"] == [1.0]
    manager.close()


def test_history_and_best_are_all_written_and_others_coalesce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(monkeypatch)
    manager = _manager(tmp_path, async_mode="async")
    _save(manager, 1, history=True)
    slow.begun.wait(20)
    for step in (2, 3, 4):
        _save(manager, step)
    _save(manager, 5, best=True)
    threading.Timer(0.2, slow.go.set).start()
    _save(manager, 6, history=True)
    _save(manager, 7)
    manager.close()
    assert _names(tmp_path) == ["best", "ckpt-s000000000001", "ckpt-s000000000006", "latest"]
    again = _manager(tmp_path)
    assert [_step(again, name) for name in _names(tmp_path)] == [5, 1, 6, 7]
    assert slow.writes <= 5


def _fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_of_the_background_surfaces_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = _manager(tmp_path, async_mode="async")
    _save(manager, 1)
    manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_file", _fail)
        _save(manager, 2)
        manager._executor.wait()
    with pytest.raises(CheckpointError, match=r"No space left on device.*Still good in .*: latest \(step 1\)"):
        _save(manager, 3)
    _save(manager, 4)
    assert _step(manager, "latest") == 4
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_file", _fail)
        _save(manager, 5)
        manager._executor.wait()
    with pytest.raises(CheckpointError, match="No space left"):
        manager.close()
    manager.close()
    assert _step(_manager(tmp_path), "latest") == 4


def test_close_gives_up_in_time_and_leaves_things_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = _manager(tmp_path, async_mode="async")
    _save(manager, 1)
    manager.wait()
    slow = _Slow(monkeypatch)
    _save(manager, 2)
    manager.close(0.1)
    assert _step(_manager(tmp_path), "latest") == 1
    slow.go.set()
    manager._executor.wait()


# Several ranks


def _save_and_fail_on_two_ranks(directory: Path) -> list[str]:
    domain = Domain()
    seen = []
    for mode in ("disabled", "async"):
        manager = _manager(directory / mode, domain=domain, async_mode=mode)
        _save(manager, 1, history=True)
        manager.wait()
        seen.append(f"{manager.find_latest()} {_step(manager, 'latest')}")
        if domain.rank == 0:
            storage.write_file = _fail  # type: ignore[assignment]
        try:
            _save(manager, 2)
            manager.wait()
        except CheckpointError as error:
            seen.append("No space left" in str(error) and type(error).__name__)
        manager.close()
        if domain.rank == 0:
            storage.write_file = _ORIGINAL
        try:
            manager.load_checkpoint("ckpt-none")
        except CheckpointNotFound:
            seen.append("not found")
    return seen


_ORIGINAL = storage.write_file


def test_all_ranks_see_the_same(tmp_path: Path) -> None:
    seen = run_processes(_save_and_fail_on_two_ranks, tmp_path, world_size=2, init_process_group=True)
    assert seen == [["latest 1", "CheckpointDiskError", "not found"] * 2] * 2
