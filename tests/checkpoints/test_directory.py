"""Which checkpoint a name, a path or the newest save means, which number a save gets and what it replaces: no manager, no run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.saves import make_manager, record_saves

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointSettings,
    storage,
)
from danling.checkpoints.directory import CheckpointDirectory, DiskSharing
from danling.checkpoints.manifest import Record
from danling.checkpoints.store import FileStore

OLDEST, SECOND = "ckpt-s000000000001", "ckpt-s000000000002"
TOO_MUCH = 1 << 60


def _open(
    path: Path, *, run: str = "run", load_only: bool = False, keep: int = 1, mirror: Any = None, **compare: Any
) -> CheckpointDirectory:
    settings = CheckpointSettings(load_only=load_only, keep_latest_k=keep)
    found = CheckpointDirectory(path, first=FileStore, run_id=run, settings=settings, **compare)
    found.mirror = mirror
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three saves: of the first two there is history, the first one is the best."""
    return record_saves("file", tmp_path / "checkpoints", keep=0)


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_name_and_a_path_mean_the_same_checkpoint(place: Path) -> None:
    directory = _open(place)
    path = place / f"{OLDEST}.pth"
    assert directory.verified(OLDEST) == directory.verified(path) == (-1, path)
    record = directory.describe(OLDEST)
    assert record is not None and (record.step, record.run) == (1, "run")
    assert {found.name for found, _ in directory.records()} == {OLDEST, SECOND, "best", "latest"}


def test_a_checkpoint_of_another_kind_is_found_beside_its_own(place: Path) -> None:
    other = make_manager("dcp", place.parent / "other")
    other.save_checkpoint({"format_version": 1, "model": {}, "state": {}}, epoch=0, global_step=9)
    other.close()
    directory = _open(place.parent / "other")
    assert directory.find_latest() == str(place.parent / "other" / "latest")
    assert directory.verified("latest")[1].parent.name == "targets"


def test_what_is_damaged_is_skipped_for_an_older_one_and_loading_it_by_name_is_refused(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(place / "latest.pth")
    directory = _open(place)
    with caplog.at_level(logging.WARNING, logger="danling"):
        assert directory.find_latest() == SECOND
        assert directory.find_latest() == SECOND
    assert len([text for text in caplog.messages if "latest.pth is skipped" in text]) == 1
    with pytest.raises(CheckpointDamaged, match="latest"):
        directory.verified("latest")
    directory.skip(SECOND, CheckpointDamaged("it cannot be read"))
    assert directory.find_latest() == "best"


def test_where_everything_is_damaged_nobody_begins_anew(place: Path) -> None:
    for file in place.glob("*.pth"):
        if not os.path.samefile(file, place / "best.pth") or file.name == "best.pth":
            _damage(file)
    directory = _open(place)
    assert directory.find_latest() is None
    with pytest.raises(CheckpointDamaged, match="there are some. Received none that does"):
        directory.refuse_lost()
    _open(place.parent / "empty").refuse_lost()


def test_what_is_not_there_is_said_with_what_is(place: Path) -> None:
    expected = f"there are: best, {OLDEST}, {SECOND}, latest"
    with pytest.raises(CheckpointNotFound, match=expected) as raised:
        _open(place).verified("ckpt-s000000000007")
    assert "Received: 'ckpt-s000000000007'" in str(raised.value)


def test_another_run_is_refused_with_what_differs_unless_one_only_looks(place: Path) -> None:
    seen: list[Mapping[str, Any]] = []

    def compare(payload: Mapping[str, Any]) -> list[str]:
        seen.append(payload)
        return ["optim.lr: stored 1, now 2"]

    directory = _open(place, run="other", compare=compare)
    assert directory.is_foreign() and not _open(place).is_foreign()
    with pytest.raises(
        CheckpointMismatch, match="of run run, whose configuration differs:\n  optim.lr: stored 1, now 2"
    ):
        directory.find_latest()
    assert [payload["state"] for payload in seen] == [{"step": 3}]
    with pytest.raises(CheckpointMismatch):
        directory.verified("best")
    assert _open(place, run="other", load_only=True).verified("best")[1] == place / "best.pth"


def test_what_lies_on_a_disk_of_its_own_is_not_loaded(place: Path) -> None:
    directory = _open(place)
    directory.share(DiskSharing(is_split=True, follows=True))
    assert directory.find_latest() is None
    with pytest.raises(CheckpointNotFound):
        directory.verified("latest")
    directory.share(DiskSharing())
    assert directory.find_latest() == "latest"


def test_what_a_killed_save_has_left_is_removed_for_its_own_run_alone(place: Path) -> None:
    left = place / f"{storage.UPLOADING}1"
    left.write_text("half")
    _open(place, run="other").tidy()
    assert left.exists()
    _open(place).tidy()
    assert not left.exists()


def test_after_a_failure_it_says_what_is_left(place: Path) -> None:
    assert _open(place).still_good() == (
        f"Still good in {place}: latest (step 3), {SECOND} (step 2), best (step 1), {OLDEST} (step 1)."
    )
    empty = place.parent / "empty"
    assert f"in {empty} no complete checkpoint" in _open(empty).still_good()


# Saves


@dataclass
class Copies:
    """A mirror with saves that it has not copied yet."""

    waiting: frozenset[int] = frozenset()
    given_up: list[str] = field(default_factory=list)

    def pending(self) -> frozenset[int]:
        return self.waiting

    def let_go(self) -> list[str]:
        self.waiting = frozenset()
        return self.given_up


def _save(directory: CheckpointDirectory, *names: str, needed: int = 1) -> list[Record]:
    return directory.open_save(list(names), needed=needed, epoch=1, global_step=4)


def test_the_first_save_makes_the_directory(tmp_path: Path) -> None:
    directory = _open(tmp_path / "new")
    best, latest = _save(directory, "best", "latest")
    assert best == Record("best", 1, 0, (), "run", 4, 1) and latest.name == "latest"
    assert _save(directory, "latest")[0].sequence == 2
    assert (tmp_path / "new").is_dir()


def test_a_save_after_the_newest_goes_on_and_after_an_older_one_branches(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = _open(place)
    directory.continue_from(directory.describe("latest"))
    assert [(record.sequence, record.branch) for record in _save(directory, "latest")] == [(4, 0)]
    older = _open(place)
    older.continue_from(older.describe(OLDEST))
    assert older.resumed is not None and older.resumed.step == 1
    with caplog.at_level(logging.WARNING, logger="danling"):
        record = _save(older, "latest")[0]
    assert (record.sequence, record.branch, record.line) == (4, 1, ((0, 1),))
    assert f"Going on from {OLDEST}: 2 saves in {place} are no longer part of this run." in caplog.messages


def test_another_run_is_refused_before_a_number_is_given(place: Path) -> None:
    directory = _open(place, run="other")
    with pytest.raises(CheckpointMismatch, match="of this run \\(other\\)"):
        _save(directory, "latest")


def test_retention_spares_what_it_goes_on_from_and_what_is_still_copied(place: Path) -> None:
    copies = Copies(waiting=frozenset({1}))
    directory = _open(place, mirror=copies)
    directory.prune()
    assert (place / f"{OLDEST}.pth").exists(), "nothing is removed before the first save of the process"
    (place / "best.pth").unlink()
    (place / "best.pth.sha256").unlink()
    directory.continue_from(directory.describe("latest"))
    _save(directory, "latest")
    directory.prune()
    assert (place / f"{OLDEST}.pth").exists()
    copies.waiting = frozenset()
    directory.prune()
    assert not (place / f"{OLDEST}.pth").exists() and (place / f"{SECOND}.pth").exists()


def test_a_full_disk_is_told_before_anything_is_written_and_copies_that_wait_give_way(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = _open(place)
    with pytest.raises(CheckpointError):
        _save(directory, "latest", needed=TOO_MUCH)
    copies = Copies(given_up=["best", "latest"])
    directory = _open(place, mirror=copies)
    with caplog.at_level(logging.WARNING, logger="danling"), pytest.raises(CheckpointError):
        _save(directory, "latest", needed=TOO_MUCH)
    assert any("best, latest will not be copied to the object store" in text for text in caplog.messages)
    assert _save(directory, "latest")[0].sequence == 4, "a refused save takes no number"


def test_only_machines_with_disks_of_their_own_follow_the_main_one(place: Path) -> None:
    directory = _open(place)
    asked: list[object] = []

    def exchange(value: object) -> list[Any]:
        asked.append(value)
        return [value]

    directory.follow(4, exchange, is_main=True)
    assert asked == []
    directory.share(DiskSharing(is_split=True))
    directory.follow(4, exchange, is_main=True)
    assert asked == [set()]
