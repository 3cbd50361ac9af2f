"""A manager finds and reads checkpoints in a store: those of its run on an empty machine, and what a URL names."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from support.remote_runs import upload_run
from support.saves import load, make_manager, save

from danling.checkpoints import CheckpointDamaged, CheckpointManager, CheckpointNotFound
from danling.checkpoints.manifest import history_name
from danling.remote.sources import RemoteSources
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout, StoredRun

LAYOUT = RunLayout("family", "run")


class Remote:
    """A run of which the store has a copy, and machines that begin with nothing."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.url = f"file://{root}/bucket"
        self.first = root / "first"
        self.machines = 0

    def train(self, *steps: int) -> None:
        """Save some steps on the first machine, and copy them."""
        manager = make_manager(self.kind, self.first / "checkpoints", keep=0)
        if manager.find_latest() is not None:
            manager.begin(str(manager.find_latest()))
        for step in steps:
            save(manager, step, history=True, best=step == 2)
        manager.close()
        upload_run(self.first, open_store(self.url), LAYOUT)

    def manager(
        self, directory: Path | None = None, *, home: bool = True, run: str = "run"
    ) -> CheckpointManager:
        """Return a manager of a machine of which the disk is empty, or has a directory."""
        self.machines += 1
        directory = directory or self.root / f"machine-{self.machines}" / "checkpoints"
        manager = make_manager(self.kind, directory, keep=0, run=run)
        known = StoredRun(open_store(self.url), LAYOUT) if home else None
        manager.checkpoints.look_in(
            lambda: RemoteSources(directory, home=known), own=known is not None
        )
        return manager

    def object_of(self, step: int) -> Path:
        """Return the file in the store that has the weights of a step."""
        name = history_name(step_mode=True, epoch=0, global_step=step)
        found = StoredRun(open_store(self.url), LAYOUT).choose(name)
        file = max(found.manifest.files, key=lambda file: found.manifest.files[file][0])
        return self.root / "bucket" / LAYOUT.checkpoints / found.key(file)


@pytest.fixture(params=["file", "dcp"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    return Remote(tmp_path, request.param)


def resume(manager: CheckpointManager) -> int | None:
    """Load the newest checkpoint that verifies, as a run does, and return its step; `None` without one."""
    while source := manager.find_latest():
        try:
            return load(manager, source)
        except CheckpointDamaged as error:
            manager.checkpoints.skip(source, error)
    return None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_an_empty_machine_goes_on_from_the_newest(remote: Remote) -> None:
    remote.train(1, 2, 3)
    manager = remote.manager()
    source = manager.find_latest()
    assert source is not None and load(manager, source) == 3
    manager.begin(source)
    save(manager, 4, best=False)
    # The branch of saves continues: nothing of the store was given up for it.
    assert manager.store.records(complete=True)[-1].sequence == 4
    again = make_manager(remote.kind, manager.directory, keep=0)
    assert load(again, "latest") == 4 and load(manager, "best") == 2
    assert (
        manager.find_latest() is not None
        and load(manager, history_name(step_mode=True, epoch=0, global_step=1)) == 1
    )
    manager.close()
    assert not list(manager.directory.glob(".*"))


def test_local_bytes_come_first_and_a_newer_save_of_the_store_wins(
    remote: Remote, tmp_path: Path
) -> None:
    remote.train(1, 2)
    shutil.copytree(remote.first, tmp_path / "second")
    remote.train(3)
    manager = remote.manager(tmp_path / "second" / "checkpoints")
    assert resume(manager) == 3
    # What is here is not asked for again.
    shutil.rmtree(
        tmp_path
        / "bucket"
        / LAYOUT.root
        / "checkpoints"
        / ("objects" if remote.kind == "file" else "targets")
    )
    manager = remote.manager(tmp_path / "second" / "checkpoints")
    assert load(manager, str(manager.find_latest())) == 3


def test_a_flipped_byte_in_the_store_is_passed_over_for_the_older_save(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.train(1, 2, 3)
    flip(remote.object_of(3))
    manager = remote.manager()
    with caplog.at_level(logging.WARNING, "danling"):
        assert resume(manager) == 2
    assert (
        "another SHA-256" in caplog.text and f"{remote.url}/family/run/checkpoints/" in caplog.text
    )


def test_older_save_counts_despite_a_damaged_one_of_another_kind_with_its_name(
    tmp_path: Path,
) -> None:
    remote = Remote(tmp_path, "file")
    for kind, step in (("file", 1), ("dcp", 2)):
        manager = make_manager(kind, remote.first / "checkpoints", keep=0)
        if manager.find_latest() is not None:
            manager.begin(str(manager.find_latest()))
        save(manager, step, history=False, best=False)
        manager.close()
    upload_run(remote.first, open_store(remote.url), LAYOUT)
    flip(next((tmp_path / "bucket").rglob("*.distcp")))
    assert resume(remote.manager()) == 1


def test_a_damaged_local_save_is_brought_back_from_the_store(remote: Remote) -> None:
    remote.train(1, 2)
    newest = max(
        remote.first.rglob("*"),
        key=lambda path: (path.name == "latest.pth", path.suffix == ".distcp", path),
    )
    flip(newest)
    assert resume(remote.manager(remote.first / "checkpoints")) == 2


def test_nothing_counts_without_its_manifest(remote: Remote) -> None:
    remote.train(1, 2, 3)
    for manifest in (remote.root / "bucket").rglob("*sha256"):
        manifest.unlink()
    manager = remote.manager()
    assert manager.find_latest() is None


def test_run_without_a_verified_save_does_not_start_from_scratch(remote: Remote) -> None:
    remote.train(1)
    flip(remote.object_of(1))
    manager = remote.manager()
    assert resume(manager) is None
    with pytest.raises(CheckpointDamaged, match="bucket/family/run"):
        manager.checkpoints.refuse_lost()


@pytest.mark.parametrize("ending", ["", "/checkpoints", "/checkpoints/latest"])
def test_a_url_names_a_checkpoint_of_another_run(remote: Remote, ending: str) -> None:
    remote.train(1, 2)
    manager = remote.manager(home=False, run="other")
    url = f"{remote.url}/family/run{ending}"
    assert load(manager, url) == 2
    manager.begin(url)
    # Nothing of it stays: the first save is the first of a line of its own.
    assert not list(manager.directory.glob(".*"))
    save(manager, 3)
    assert {record.sequence for record in manager.store.records(complete=True)} == {1}
    assert (
        load(
            manager,
            f"{remote.url}/family/run/checkpoints/{history_name(step_mode=True, epoch=0, global_step=1)}",
        )
        == 1
    )


def test_a_url_of_nothing_is_named(remote: Remote) -> None:
    remote.train(1)
    manager = remote.manager(home=False)
    with pytest.raises(CheckpointNotFound, match="there are: .*latest"):
        manager.load_checkpoint(f"{remote.url}/family/run/checkpoints/best")
    with pytest.raises(CheckpointNotFound, match="Expected the URL of a run"):
        manager.load_checkpoint("s3://bucket")
