"""Saves that go to an object store in the background: what is visible when, what an error means, what is kept."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_proxy import FaultProxy, Request
from support.object_servers import ObjectServer
from support.patience import until

from danling import RunnerConfig
from danling.checkpoints import CheckpointError, CheckpointSettings, FileCheckpointManager, storage
from danling.checkpoints.manifest import Manifest
from danling.distributed import LocalDomain
from danling.remote.mirror import RunMirror
from danling.remote.store import RemoteError, RemoteSettings, open_store
from danling.remote.stored_run import RunLayout, StoredRun

LAYOUT = RunLayout("line", "run")
QUICK = RemoteSettings(part_size=5 << 20, timeout_seconds=20.0, retries=0)


class Place:
    """A bucket, seen through a proxy by the mirror and directly by the test."""

    def __init__(self, server: ObjectServer, proxy: FaultProxy, directory: Path) -> None:
        self.server, self.proxy, self.directory = server, proxy, directory
        self.bucket = server.make_bucket()
        self.opened: list[FileCheckpointManager] = []

    def manager(self, **changes: Any) -> FileCheckpointManager:
        """Return a manager that is mirrored; `keep` is the local retention."""
        keep = changes.pop("keep", 0)
        policy = CheckpointSettings(async_mode="disabled", keep_latest_k=keep)
        manager = FileCheckpointManager(
            self.directory / "checkpoints",
            domain=LocalDomain(),
            run_id="run",
            settings=policy,
            step_mode=True,
        )
        store = open_store(f"s3://{self.bucket}/pre", settings=changes.pop("requests", QUICK))
        settings = RunnerConfig(
            {f"checkpoint.remote.{key}": value for key, value in changes.items()}
        )
        copy = RunMirror(
            StoredRun(store, LAYOUT), manager, self.directory, settings.checkpoint.remote
        )
        copy.open()
        self.opened.append(manager)
        copy.begin()
        return manager

    def keys(self, below: str = "checkpoints") -> list[str]:
        prefix = f"pre/{LAYOUT.root}/{below}/"
        return sorted(key.removeprefix(prefix) for key in self.server.objects(self.bucket, prefix))

    def names(self) -> list[str]:
        return [
            key.removesuffix(".pth.sha256") for key in self.keys() if key.endswith(".pth.sha256")
        ]

    def objects(self) -> list[str]:
        return [key.removeprefix("objects/") for key in self.keys() if key.startswith("objects/")]

    def step(self, name: str) -> int:
        """Return the step of what is visible under a name, after comparing its contents with the digest."""
        root = f"pre/{LAYOUT.checkpoints}"
        manifest = Manifest.parse(
            self.server.read(self.bucket, f"{root}/{name}.pth.sha256").decode()
        )
        size, digest = manifest.files[f"{name}.pth"]
        content = self.server.read(self.bucket, f"{root}/objects/{digest}")
        assert len(content) == size and hashlib.sha256(content).hexdigest() == digest
        return manifest.record.step


@pytest.fixture
def place(
    moto: ObjectServer, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    found = Place(moto, proxy, tmp_path / "run")
    yield found
    proxy.heal()
    for manager in found.opened:
        manager.close()


def save(manager: FileCheckpointManager, step: int, **names: bool) -> None:
    payload = {
        "format_version": 1,
        "model": {"weight": torch.full((64, 64), float(step))},
        "state": {"step": step},
    }
    manager.save_checkpoint(payload, epoch=0, global_step=step, **names)


def mirror_of(manager: FileCheckpointManager) -> RunMirror:
    assert isinstance(manager.copier, RunMirror)
    return manager.copier


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and ".pth.sha256" in request.path


def is_object(request: Request) -> bool:
    return request.method == "PUT" and "/objects/" in request.path


# What is visible when


def test_contents_go_first_and_the_manifest_of_latest_last(place: Place) -> None:
    manager = place.manager()
    save(manager, 5, history=True, best=True)
    manager.close()
    puts = [r.path for r in place.proxy.requests if r.method == "PUT" and "/checkpoints/" in r.path]
    assert [Path(path).name.partition("?")[0] for path in puts[1:]] == [
        "ckpt-s000000000005.pth.sha256",
        "best.pth.sha256",
        "latest.pth.sha256",
    ]
    assert "/objects/" in puts[0]
    assert {place.step(name) for name in place.names()} == {5} and len(place.objects()) == 1


def test_until_the_manifest_is_put_the_save_before_counts(place: Place) -> None:
    manager = place.manager()
    save(manager, 1)
    manager.wait_for_copies()
    fault = place.proxy.hold(when=is_manifest)
    save(manager, 2)
    assert fault.came.wait(30)
    assert place.step("latest") == 1 and len(place.objects()) == 2
    fault.release()
    manager.close()
    assert place.step("latest") == 2 and len(place.objects()) == 1, (
        "what no name leads to any more is removed"
    )


def test_one_save_is_uploaded_and_one_replaceable_save_waits(place: Place) -> None:
    manager = place.manager()
    fault = place.proxy.hold(when=is_object)
    save(manager, 1)
    assert fault.came.wait(30)
    for step in (2, 3, 5, 6):
        save(manager, step, history=step == 3)
    assert mirror_of(manager).is_behind
    place.proxy.forget()
    fault.release()
    manager.close()
    assert place.names() == ["ckpt-s000000000003", "latest"]
    assert place.step("latest") == 6 and place.step("ckpt-s000000000003") == 3
    assert len([r for r in place.proxy.requests if is_object(r)]) == 2, (
        "those of steps 2 and 5 never went up"
    )


def test_every_nth_of_the_plain_saves_is_copied_and_the_last_always(place: Place) -> None:
    manager = place.manager(interval=3)
    for step in (1, 2, 3):
        save(manager, step)
    until(lambda: not mirror_of(manager).pending())
    save(manager, 4)
    assert place.step("latest") == 3 and mirror_of(manager).figures(4)["lag_steps"] == 1
    save(manager, 5, best=True)
    save(manager, 6)
    manager.close()
    assert place.step("best") == 5 and place.step("latest") == 6


# Retention


def test_the_store_keeps_its_own_number(place: Place) -> None:
    manager = place.manager(keep=1, keep_latest_k=3)
    for step in range(1, 6):
        save(manager, step, history=True, best=step == 1)
        manager.wait_for_copies()
    save(manager, 6)
    manager.close()
    local = sorted(path.stem for path in (place.directory / "checkpoints").glob("ckpt-*.pth"))
    # The save of the best counts as history too, and shares its file.
    assert local == ["ckpt-s000000000001", "ckpt-s000000000005"]
    assert place.names() == [
        "best",
        *(f"ckpt-s00000000000{step}" for step in (1, 3, 4, 5)),
        "latest",
    ]
    assert len(place.objects()) == 5


def test_uncopied_save_stays_on_the_disk(place: Place) -> None:
    manager = place.manager(keep=1)
    fault = place.proxy.hold(when=is_object)
    for step in (1, 2, 3):
        save(manager, step, history=True)
    checkpoints = place.directory / "checkpoints"
    assert len(list(checkpoints.glob("ckpt-*.pth"))) == 3
    fault.release()
    manager.wait_for_copies()
    save(manager, 4, history=True)
    manager.wait_for_copies()
    save(manager, 5)
    assert [path.stem for path in checkpoints.glob("ckpt-*.pth")] == ["ckpt-s000000000004"]
    manager.close()
    assert [place.step(f"ckpt-s00000000000{step}") for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert not list(checkpoints.glob(f"{storage.UPLOADING}*"))


def test_saves_kept_for_their_upload_are_removed_at_the_end(place: Place) -> None:
    manager = place.manager(keep=1)
    fault = place.proxy.hold(when=is_object)
    for step in (1, 2, 3):
        save(manager, step, history=True)
    fault.release()
    manager.close()
    assert [path.stem for path in (place.directory / "checkpoints").glob("ckpt-*.pth")] == [
        "ckpt-s000000000003"
    ]
    assert [place.step(f"ckpt-s00000000000{step}") for step in (1, 2, 3)] == [1, 2, 3]


def test_full_disk_drops_waiting_saves_and_logs_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = place.manager(keep=1)
    fault = place.proxy.hold(when=is_object)
    for step in (1, 2, 3):
        save(manager, step, history=True)
    assert fault.came.wait(30)
    checkpoints = place.directory / "checkpoints"
    real = storage.require_space

    def little(directory: Path, needed: int) -> None:
        if (checkpoints / "ckpt-s000000000002.pth").exists():
            raise CheckpointError("no room")
        real(directory, needed)

    monkeypatch.setattr(storage, "require_space", little)
    with caplog.at_level(logging.WARNING, "danling"):
        save(manager, 4, history=True)
    assert "ckpt-s000000000002" in caplog.text and "no room for the next save" in caplog.text
    fault.release()
    manager.close()
    assert place.names() == ["ckpt-s000000000001", "ckpt-s000000000004", "latest"]


# Errors


def test_failing_store_does_not_stop_training_and_close_names_missing_saves(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    manager = place.manager()
    save(manager, 1)
    manager.wait_for_copies()
    place.proxy.answer(503, "SlowDown")
    with caplog.at_level(logging.WARNING, "danling"):
        for step in (2, 3, 4):
            save(manager, step)
        manager.wait_for_copies()
    assert caplog.text.count("is not safe") == 1
    assert mirror_of(manager).figures(4)["lag_steps"] == 3
    with pytest.raises(
        RemoteError, match=r"Expected the last save in s3://.*/pre/line/run\. .*SlowDown.* step 1\."
    ):
        manager.close()
    place.proxy.heal()
    assert place.step("latest") == 1


def test_close_does_not_repeat_a_failed_wait_of_the_end_of_training(place: Place) -> None:
    manager = place.manager(requests=RemoteSettings(retries=0, timeout_seconds=1.0))
    fault = place.proxy.hold(when=is_object)
    save(manager, 1)
    assert fault.came.wait(30)
    manager.wait_for_copies()
    tried = fault.hit
    with pytest.raises(RemoteError, match="Expected the last save in"):
        manager.close()
    assert fault.hit == tried == 2, "the one under way, and another one"


def test_recovered_store_gets_the_newest_save(place: Place) -> None:
    manager = place.manager()
    for code, status in (("SlowDown", 503), ("AccessDenied", 403), ("InsufficientStorage", 507)):
        place.proxy.answer(status, code)
        save(manager, status)
        manager.wait_for_copies()
        place.proxy.heal()
    place.proxy.cut_upload(100)
    save(manager, 600)
    manager.wait_for_copies()
    manager.close()
    assert place.step("latest") == 600 and len(place.objects()) == 1


def test_a_lost_answer_leaves_nothing_behind(place: Place) -> None:
    manager = place.manager()
    save(manager, 1)
    manager.wait_for_copies()
    fault = place.proxy.lose_answer(when=is_object)
    save(manager, 2)
    until(lambda: fault.hit == 1)
    save(manager, 3)
    manager.close()
    assert place.step("latest") == 3 and len(place.objects()) == 1


def test_changed_file_on_the_disk_is_not_uploaded(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    manager = place.manager()
    place.proxy.answer(503, "SlowDown", times=1)
    save(manager, 1)
    until(lambda: bool(mirror_of(manager).pending()))
    path = place.directory / "checkpoints" / "latest.pth"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    with caplog.at_level(logging.WARNING, "danling"):
        manager.wait_for_copies()
    assert "another SHA-256" in caplog.text and not place.names()
    with pytest.raises(RemoteError, match="another SHA-256"):
        manager.close()


def test_replaced_run_writes_nothing_more(place: Place) -> None:
    manager = place.manager()
    save(manager, 1)
    manager.wait_for_copies()
    mirror_of(manager).lease._error = RemoteError("Another process writes there.")
    place.proxy.forget()
    save(manager, 2)
    with pytest.raises(RemoteError, match="Another process writes there"):
        manager.close()
    assert (
        not [r for r in place.proxy.requests if is_object(r) or is_manifest(r)]
        and place.step("latest") == 1
    )


# The begin


def test_run_from_scratch_does_not_overwrite_an_existing_one(place: Place, tmp_path: Path) -> None:
    manager = place.manager()
    save(manager, 7)
    manager.close()
    place.directory = tmp_path / "elsewhere"
    with pytest.raises(
        RemoteError,
        match=r"to contain no run, since this one begins from scratch\. Received: one at step 7\.",
    ):
        place.manager()
    assert place.step("latest") == 7


def test_files_on_the_disk_are_copied_before_the_first_save(place: Place) -> None:
    alone = FileCheckpointManager(
        place.directory / "checkpoints",
        domain=LocalDomain(),
        run_id="run",
        settings=CheckpointSettings(async_mode="disabled"),
        step_mode=True,
    )
    save(alone, 1, history=True, best=True)
    save(alone, 2)
    alone.close()
    manager = place.manager()
    manager.wait_for_copies()
    assert place.step("best") == place.step("ckpt-s000000000001") == 1 and place.step("latest") == 2
    manager.close()
    place.proxy.forget()
    place.manager().close()
    assert not [r for r in place.proxy.requests if is_object(r) or is_manifest(r)], (
        "nothing is missing"
    )


def test_remains_of_a_killed_upload_are_removed(place: Place) -> None:
    manager = place.manager()
    save(manager, 1)
    manager.close()
    checkpoints = place.directory / "checkpoints"
    os.link(checkpoints / "latest.pth", checkpoints / f"{storage.UPLOADING}0123")
    place.server.write(
        place.bucket, f"pre/{LAYOUT.checkpoints}/objects/{'f' * 64}", b"contents without a manifest"
    )
    manager = place.manager()
    manager.checkpoints.tidy()
    assert not list(checkpoints.glob(f"{storage.UPLOADING}*"))
    manager.begin("latest")
    save(manager, 2)
    manager.close()
    assert len(place.objects()) == 1 and place.step("latest") == 2


# The other files


def test_files_of_the_run_go_before_the_save_becomes_visible(place: Place) -> None:
    place.directory.mkdir()
    (place.directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (place.directory / "logs").mkdir()
    (place.directory / "logs" / "first.log").write_text("line\n")
    manager = place.manager()
    fault = place.proxy.hold(when=is_manifest)
    save(manager, 1)
    assert fault.came.wait(30) and place.keys("files") == ["logs/first.log", "metrics.jsonl"]
    fault.release()
    manager.wait_for_copies()
    place.proxy.forget()
    # What cannot be read keeps no save from being safe.
    os.mkfifo(place.directory / "logs" / "pipe")
    os.symlink("loop", place.directory / "logs" / "loop")
    (place.directory / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    save(manager, 2)
    manager.close()
    puts = [r.path for r in place.proxy.requests if r.method == "PUT" and "/files/" in r.path]
    assert len(puts) == 1 and "metrics.jsonl" in puts[0]
    assert place.server.read(place.bucket, f"pre/{LAYOUT.file('metrics.jsonl')}").count(b"\n") == 2


def test_targets_of_links_are_not_copied(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outside = tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "secret.txt").write_text("of another program")
    (outside / "below" / "secret.txt").write_text("of another program")
    for name in ("logs", "tensorboard"):
        (place.directory / name).mkdir(parents=True)
    (place.directory / "logs" / "first.log").write_text("line\n")
    os.symlink(outside, place.directory / "metadata")
    os.symlink(outside / "secret.txt", place.directory / "logs" / "link.log")
    os.link(outside / "secret.txt", place.directory / "logs" / "hard.log")
    os.symlink(outside / "secret.txt", place.directory / "results.json")
    os.symlink(outside / "below", place.directory / "tensorboard" / "events")
    with (place.directory / "logs" / "large.log").open("wb") as sparse:
        sparse.truncate(8 << 30)
    manager = place.manager()
    for step in (1, 2):
        save(manager, step)
        manager.wait_for_copies()
    assert place.keys("files") == ["logs/first.log"]
    told = [
        record.getMessage()
        for record in caplog.records
        if "is not copied to" in record.getMessage()
    ]
    names = ("metadata", "link.log", "hard.log", "results.json", "large.log")
    assert len(told) == len(names) and all(any(name in line for line in told) for name in names)


def test_too_large_object_is_not_read(place: Place) -> None:
    store = open_store(f"s3://{place.bucket}/pre", settings=QUICK)
    store.put("a", b"12345")
    assert store.get("a", limit=5) == b"12345"
    with pytest.raises(RemoteError, match="at most 4 bytes at a. Received: 5 bytes"):
        store.get("a", limit=4)
